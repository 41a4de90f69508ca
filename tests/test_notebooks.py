"""Every lesson: well formed, green headless, small and readable when executed."""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import re
import sys

import nbformat
import papermill
import pytest
import torch
from PIL import Image

from tests.course_pages import course, index, page
from tests.run_notebooks import COLD, FOLDER, LESSONS, LIMIT_BYTES, declared, execute

NAMES = [lesson.stem for lesson in LESSONS]


def outputs(notebook):
    return [(cell, output) for cell in notebook.cells for output in cell.get("outputs", [])]


def number(lesson):
    """ "16c", of a lesson's file."""
    return lesson.stem.split("_")[0]


@pytest.fixture(params=LESSONS, ids=NAMES)
def lesson(request):
    return request.param


def test_a_lesson_is_committed_clean(lesson):
    notebook = nbformat.read(lesson, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in code)
    assert notebook.metadata.kernelspec.name == "python3"
    assert notebook.cells[0].source.startswith(f"# {number(lesson)} · ")


def test_a_lesson_has_one_cell_of_plain_parameters(lesson):
    notebook = nbformat.read(lesson, as_version=4)
    cells = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    assert len(cells) == 1
    for statement in ast.parse(cells[0].source).body:
        assert isinstance(statement, ast.Assign)
        ast.literal_eval(statement.value)
    assert {"seed", "dataset", "data_root"} <= declared(lesson)


def test_a_lesson_checks_its_own_claim_and_ends_with_questions(lesson):
    notebook = nbformat.read(lesson, as_version=4)
    last_code = [cell for cell in notebook.cells if cell.cell_type == "code"][-1]
    assert last_code.source.count("assert ") >= 3
    assert any(cell.source.startswith("## Change this and run again") for cell in notebook.cells[-2:])


def test_reserved_ranks_are_still_there_for_what_the_reader_is_asked_to_change(lesson):
    code = [cell.source for cell in nbformat.read(lesson, 4).cells if cell.cell_type == "code"]
    reserved = {name for source in code for name in re.findall(r"^(\w+) = labkit\.Session\(", source, re.MULTILINE)}
    assert [name for name in reserved for source in code if f"\n{name}.close()" in f"\n{source}"] == []


def test_no_cell_is_too_long_to_be_read(lesson):
    """But those that draw, and are hidden until they are asked for."""
    cells = [cell for cell in nbformat.read(lesson, as_version=4).cells if cell.cell_type == "code"]
    shown = [cell for cell in cells if not cell.metadata.get("jupyter", {}).get("source_hidden")]
    assert [cell.id for cell in shown if cell.source.count("\n") >= 30] == []


def test_the_line_that_fails_where_a_lesson_was_moved_away_from_the_course_says_where_it_lies(lesson):
    lines = [
        line
        for cell in nbformat.read(lesson, as_version=4).cells
        if cell.cell_type == "code"
        for line in cell.source.splitlines()
        if re.match("(?:import|from) course", line)
    ]
    assert lines[0].endswith("  # the folder beside this notebook: its kernel must start there")


def test_links_between_lessons_lead_somewhere(lesson):
    for cell in nbformat.read(lesson, as_version=4).cells:
        for target in re.findall(r"\]\(([^)#]+\.ipynb)\)", cell.source):
            assert (FOLDER / target).is_file(), target


def test_a_parameter_that_a_lesson_does_not_declare_is_refused(tmp_path):
    with pytest.raises(ValueError, match="declares no parameter sed; it has"):
        execute(LESSONS[0], tmp_path, {"sed": 1})


@pytest.mark.parametrize(("dies", "is_run"), [(0, True), (2, True), (3, False)])
def test_a_kernel_whose_port_was_taken_as_it_began_is_started_again(tmp_path, monkeypatch, dies, is_run):
    trials = []

    def execute_notebook(*_, **__):
        trials.append(1)
        if len(trials) <= dies:
            raise RuntimeError("Kernel died before replying to kernel_info")

    monkeypatch.setattr(papermill, "execute_notebook", execute_notebook)
    with contextlib.nullcontext() if is_run else pytest.raises(RuntimeError, match="Kernel died"):
        execute(LESSONS[0], tmp_path)
    assert len(trials) == min(dies + 1, 3)


MARKS = {name: [pytest.mark.cold] for name in COLD}
MARKS["00_start_here"].append(pytest.mark.check)


@pytest.mark.notebook
@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS.get(name, ())) for name in NAMES])
def test_a_lesson_runs_headless_and_stays_small_and_readable(name, tmp_path):
    executed = execute(FOLDER / f"{name}.ipynb", tmp_path)
    text = executed.read_text()
    assert executed.stat().st_size <= LIMIT_BYTES
    assert "widget-view+json" not in text
    assert "cdn.plot.ly" not in text
    assert "<script" not in text
    notebook = nbformat.read(executed, as_version=4)
    assert "widgets" not in notebook.metadata
    charts = [o for _, o in outputs(notebook) if "application/vnd.plotly.v1+json" in o.get("data", {})]
    assert charts, "a lesson shows something"
    for chart in charts:
        picture = Image.open(io.BytesIO(base64.b64decode(chart.data["image/png"]))).convert("L")
        assert picture.width >= 600
        assert len(picture.getcolors(256)) > 3, "the picture is not blank"
    if sys.platform == "linux" and not torch.cuda.is_available():  # elsewhere nobody counts what is sent
        tables = "".join(output.get("data", {}).get("text/html", "") for _, output in outputs(notebook))
        assert not re.search(r"<td[^>]*>\s*nan\s*</td>", tables, re.IGNORECASE), "a number is missing"
    html = page(executed).read_text()
    assert html.count("data:image/png;base64") >= len(charts), "the page shows the pictures with no network"
    assert not re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="https?://', html)


def test_the_course_and_the_readme_list_every_lesson_with_the_same_question():
    lessons = course()
    assert [lesson.name for lesson in lessons] == NAMES
    readme = (FOLDER.parent / "README.md").read_text()
    for lesson in lessons:
        assert f"| [{lesson.title}](notebooks/{lesson.name}.ipynb) | {lesson.question} |" in readme
        assert set(filter(None, lesson.needs.split(", "))) < set(map(number, LESSONS))


def test_the_index_links_what_was_run_and_says_how_it_went(tmp_path):
    executed = tmp_path / "06_ddp.ipynb"
    executed.write_text((FOLDER / executed.name).read_text())
    link = "See [lesson 07](07_model_parallel.ipynb)."
    notebook = nbformat.read(executed, as_version=4)
    notebook.cells.append(nbformat.v4.new_markdown_cell(link))
    nbformat.write(notebook, executed)
    text = page(executed).read_text()
    assert 'href="07_model_parallel.html"' in text
    assert 'href="index.html"' in text
    text = index(tmp_path, {"06_ddp": "ran in 5 s"}).read_text()
    assert text.count("<section>") == len(NAMES)
    assert re.findall('href="([^"]+)"', text) == ["06_ddp.html"]
    assert "needs 01, 03 · ran in 5 s" in text
    assert text.count("not run") == len(NAMES) - 1
    assert "<script" not in text
    assert "http" not in text
