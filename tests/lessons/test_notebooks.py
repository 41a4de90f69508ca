"""Every lesson: well formed; green headless in the copy that students get, small and readable when executed."""

from __future__ import annotations

import ast
import re
import sys

import nbformat
import pytest
import torch

from course import handout
from tests.support.tiers import few
from tests.tools.course_table import (
    LINES_A_MINUTE,
    MINUTES_AN_EXERCISE,
    PAGE,
    WORDS_A_MINUTE,
    course,
    minutes,
)
from tests.tools.run_notebooks import COLD, FOLDER, LESSONS, LIMIT_BYTES, declared, execute

NAMES = [lesson.stem for lesson in LESSONS]

PLOTLY = "application/vnd.plotly.v1+json"


NOTEBOOKS = {lesson.stem[:2]: nbformat.read(lesson, as_version=4) for lesson in LESSONS}
"""By the lesson's number."""


@pytest.fixture(params=NAMES)
def name(request):
    return request.param


@pytest.fixture
def notebook(name):
    return NOTEBOOKS[name[:2]]


@pytest.fixture
def code(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_a_lesson_is_committed_clean(name, notebook, code):
    nbformat.validate(notebook)
    assert all(not cell.outputs and cell.execution_count is None for cell in code)
    assert notebook.metadata.kernelspec.name == "python3"
    assert notebook.metadata.language_info.file_extension == ".py", "what `nbconvert --to script` writes"
    assert notebook.cells[0].source.startswith(f"# {name[:2]} · ")


def test_a_lesson_has_one_cell_of_plain_parameters(name, code):
    (cell,) = (cell for cell in code if "parameters" in cell.metadata.get("tags", []))
    for statement in ast.parse(cell.source).body:
        assert isinstance(statement, ast.Assign)
        ast.literal_eval(statement.value)
    assert {"seed", "dataset", "data_root"} <= declared(FOLDER / f"{name}.ipynb")


def test_a_lesson_checks_its_own_claim_and_ends_with_questions(notebook, code):
    assert code[-1].source.count("assert ") >= 3
    assert any(cell.source.startswith("## Change this and run again") for cell in notebook.cells[-2:])


def test_reserved_ranks_are_still_there_for_what_the_reader_is_asked_to_change(code):
    text = "\n".join(cell.source for cell in code)
    reserved = re.findall(r"^(\w+) = labkit\.Session\(", text, re.MULTILINE)
    assert not re.search(rf"^(?:{'|'.join(['ranks', *reserved])})\.close\(\)|^%ranks --end", text, re.MULTILINE)


def test_no_cell_is_too_long_to_be_read(name, code):
    """But those that draw, and are hidden until they are asked for. Lessons for beginners have shorter ones.

    A whole script that a cell writes to a file may have 76 lines: somebody is to take it away as it is.
    """
    shown = [cell for cell in code if not cell.metadata.get("jupyter", {}).get("source_hidden")]
    most = 20 if name[:2] <= "07" else 30
    counts = [(cell, cell.source.count("\n") + 1) for cell in shown]
    long = {c.id: lines for c, lines in counts if lines > (76 if c.source.startswith("%%writefile") else most)}
    assert long == {}


def test_the_line_that_fails_where_a_lesson_was_moved_away_from_the_course_says_where_it_lies(code):
    lines = (line for cell in code for line in cell.source.splitlines() if re.match("(?:import|from) course", line))
    assert next(lines).endswith("  # the folder beside this notebook: its kernel must start there")


def test_links_between_lessons_lead_somewhere(notebook):
    for cell in notebook.cells:
        for target in re.findall(r"\]\(([^)#]+\.ipynb)\)", cell.source):
            assert (FOLDER / target).is_file(), target


def test_an_exercise_comes_before_its_answer(code):
    """In the cells that a lesson shows: nothing before an exercise defines what the exercise asks for."""
    defined = set()
    for cell in code:
        names = set(re.findall(r"^\s*def (\w+)\(", cell.source, re.MULTILINE))
        if "exercise" in cell.metadata.get("tags", []):
            asked = names & set(re.findall(r"^def (\w+)\(", cell.source, re.MULTILINE))
            assert not asked & defined, f"{asked} is answered before it is asked"
        defined |= names


def test_the_reference_never_takes_the_name_of_what_you_write(code):
    """Else a check that is run again would note the reference as the learner's own."""
    for cell in code:
        for taken, asked in re.findall(r"(\w+), \w+ = course\.mine\(\s*\"(\w+)\"", cell.source):
            assert taken != asked, cell.id


# Run from the copy that students get


@pytest.fixture(scope="session")
def handed_out(tmp_path_factory):
    return handout.hand_out(tmp_path_factory.mktemp("handed-out") / "course")


MARKS = {name: [pytest.mark.cold] for name in COLD}
MARKS["00_start_here"].append(pytest.mark.check)

OF_EACH_KIND = {"08", "09", "11", "12", "13", "14", "15", "17", "19", "22", "24"}
"""Lessons after the first route that `make test` runs."""


@pytest.mark.notebook
@pytest.mark.parametrize(
    "name",
    few(
        [pytest.param(name, marks=MARKS.get(name, ())) for name in NAMES],
        lambda name: name.values[0] < "08" or name.values[0][:2] in OF_EACH_KIND,
    ),
)
def test_a_lesson_runs_headless_and_stays_small_and_readable(name, handed_out, tmp_path):
    """With its exercises unsolved: `test_exercises.py` tries the references."""
    lesson = handed_out / f"{name}.ipynb"
    unsolved = {"answers": "none"} if "answers" in declared(lesson) else {}
    executed = execute(lesson, tmp_path, unsolved, cwd=handed_out)
    text = executed.read_text()
    assert executed.stat().st_size <= LIMIT_BYTES
    assert "widget-view+json" not in text
    assert "cdn.plot.ly" not in text
    assert "<script" not in text
    assert not re.findall(r'<(?:link|img)[^>]+(?:src|href)=\\?"https?://', text), "it is shown with no network"
    notebook = nbformat.read(executed, as_version=4)
    assert "widgets" not in notebook.metadata
    shown = [(cell, output.get("data", {})) for cell in notebook.cells for output in cell.get("outputs", [])]
    charts = [data[PLOTLY] for _, data in shown if PLOTLY in data]
    assert shown, "a lesson shows something"
    assert all(chart["data"] for chart in charts), "no chart is blank"
    checks = [data["text/plain"] for cell, data in shown if "course.check(" in cell.source]
    assert all("unsolved: the notebook runs with answers = 'none'" in check for check in checks)
    if sys.platform == "linux" and not torch.cuda.is_available():  # elsewhere nobody counts what is sent
        tables = "".join(data.get("text/html", "") for _, data in shown)
        assert not re.search(r"<td[^>]*>\s*nan\s*</td>", tables, re.IGNORECASE), "a number is missing"


def test_a_parameter_that_a_lesson_does_not_declare_is_refused(tmp_path):
    with pytest.raises(ValueError, match="declares no parameter sed; it has"):
        execute(LESSONS[0], tmp_path, {"sed": 1})


# The course's table and routes


def test_the_table_of_the_course_lists_every_lesson():
    lessons = course()
    assert [lesson.name for lesson in lessons] == NAMES
    for lesson in lessons:
        assert lesson.question
        assert set(filter(None, lesson.needs.split(", "))) < {name[:2] for name in NAMES}


ROUTE = re.compile(r"^\| \*\*(.+?)\*\*[^|]*\| ([^|]+) \| ([\d.]+) hours \|$", re.MULTILINE)
"""A route in the guide: its name, its lessons, and hours."""


def routes():
    """The lessons of each route, by its name, as "00, 03, 21 to 26" is written there, and the hours that are said."""
    numbers = {lesson.name.split("_")[0]: lesson for lesson in course()}
    found = {}
    for name, route, hours in ROUTE.findall(PAGE.read_text("utf-8")):
        spans = [part.partition(" to ")[::2] for part in route.split(", ")]
        chosen = [n for n in numbers if any(first <= n <= (last or first) for first, last in spans)]
        assert len(chosen) >= len(spans), f"{name} names a lesson that is not there: {route}"
        found[name] = {number: numbers[number] for number in chosen}, float(hours)
    return found


def test_the_hours_of_the_routes_are_those_of_the_estimate():
    said = f"{WORDS_A_MINUTE} words or {LINES_A_MINUTE} lines of code a minute, {MINUTES_AN_EXERCISE} minutes"
    assert said in PAGE.read_text("utf-8").replace("\n", " ")
    for name, (lessons, hours) in routes().items():
        assert hours == pytest.approx(sum(map(minutes, lessons.values())) / 60, abs=0.6), name


def test_a_route_contains_what_its_lessons_need():
    found = {name: lessons for name, (lessons, _) in routes().items()}
    assert list(found) == ["Compare", "Right and fast", "Keep it alive", "Bigger than a GPU"]
    for name, lessons in found.items():
        there = {*found["Compare"], *lessons}
        for each in lessons.values():
            assert set(filter(None, each.needs.split(", "))) <= there, f"{each.name} in {name}"
