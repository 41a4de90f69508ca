"""Every lesson: well formed, green headless, small and readable when executed."""

from __future__ import annotations

import ast
import base64
import io
import os
import re
import tempfile

import nbformat
import pytest
from PIL import Image

from tests import cluster
from tests.course_pages import course, index, page
from tests.run_notebooks import FOLDER, LESSONS, LIMIT_BYTES, declared, execute
from tests.slices import slice_for

NAMES = [lesson.stem for lesson in LESSONS]
OTHER = {
    "00_start_here": {"seed": 1, "world_size": 3},
    "01_one_process": {"seed": 1},
    "02_from_a_cell_to_ranks": {"seed": 1, "world_size": 3},
    "03_collectives": {"seed": 1, "world_size": 3},
    "04_data_parallel": {"seed": 1, "devices": 3},
    "05_ddp_by_hand": {"seed": 1, "world_size": 3},
    "06_ddp": {"seed": 1, "world_size": 3},
    "07_model_parallel": {"seed": 1},
    "08_pipeline": {"seed": 1},
    "09_sharding": {"seed": 1, "world_size": 4},
    "10_compare": {"seed": 1, "world_size": 4, "steps": 8},
    "11_scaling": {"seed": 1, "batch_size": 100, "repeats": 3},
    "12_when_parallel_equals_serial": {"seed": 1, "world_size": 3},
    "13_checkpoint": {"seed": 1, "world_size": 3},
    "14_when_it_hangs": {"seed": 1, "world_size": 4, "odd": 2},
    "15_outgrow_the_machine": {"seed": 1},
    "16_pitfalls": {
        "seed": 1,
        "world_size": 3,
        "predictions": {"No address": "it waits for the others", "group=0": "an error"},
    },
}
"""A second run of each, with another seed and more ranks where the lesson has them."""

AGAIN = [name for name in NAMES if os.environ.get("LABKIT_LONG") or name[:2] in ("00", "01", "04", "06", "07", "10")]
"""Those that `make test` runs a second time; with LABKIT_LONG=1 in the environment, all."""


def outputs(notebook):
    return [(cell, output) for cell in notebook.cells for output in cell.get("outputs", [])]


@pytest.fixture(params=LESSONS, ids=NAMES)
def lesson(request):
    return request.param


def test_there_is_a_second_run_for_every_lesson():
    assert set(OTHER) == set(NAMES)


def test_a_lesson_is_committed_clean(lesson):
    notebook = nbformat.read(lesson, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in code)
    assert notebook.metadata.kernelspec.name == "python3"
    assert notebook.cells[0].source.startswith(f"# {lesson.name[:2]} · ")


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


def test_links_between_lessons_lead_somewhere(lesson):
    for cell in nbformat.read(lesson, as_version=4).cells:
        for target in re.findall(r"\]\(([^)#]+\.ipynb)\)", cell.source):
            assert (FOLDER / target).is_file(), target


def test_a_parameter_that_a_lesson_does_not_declare_is_refused(tmp_path):
    with pytest.raises(ValueError, match="declares no parameter sed; it has"):
        execute(LESSONS[0], tmp_path, {"sed": 1})


@pytest.mark.notebook
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.check) if n[:2] == "00" else n for n in NAMES])
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
    html = page(executed).read_text()
    assert html.count("data:image/png;base64") >= len(charts), "the page shows the pictures with no network"
    assert not re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="https?://', html)


@pytest.mark.notebook
@pytest.mark.parametrize("name", AGAIN)
def test_a_lesson_holds_with_another_seed_and_more_ranks(name, tmp_path):
    execute(FOLDER / f"{name}.ipynb", tmp_path, {**OTHER[name]})


def test_the_course_and_the_readme_list_every_lesson_with_the_same_question():
    lessons = course()
    assert [lesson.name for lesson in lessons] == NAMES
    readme = (FOLDER.parent / "README.md").read_text()
    for lesson in lessons:
        assert f"| [{lesson.title}](notebooks/{lesson.name}.ipynb) | {lesson.question} |" in readme
        assert set(filter(None, lesson.needs.split(", "))) < {name[:2] for name in NAMES}


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


IMPORT_DDP = "from torch.nn.parallel import DistributedDataParallel\n"
NO_AVERAGING = """
class DistributedDataParallel(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, images):
        return self.module(images)
"""
BROKEN = {
    "02_from_a_cell_to_ranks": (
        "mp.spawn(train, nprocs=world_size)",
        "mp.spawn(print, nprocs=world_size)",
        "plain mp.spawn fails from a cell",
    ),
    "02_from_a_cell_to_ranks: no helpers": (
        "DataLoader(Slow(), batch_size=5, num_workers=num_workers, **several)",
        "DataLoader(Slow(), batch_size=5)",
        "loader processes load at the same time",
        {"deadline_s": 1.0},
    ),
    "03_collectives": (
        "range(2 * (world_size - 1))",
        "range(2 * (world_size - 1) - 1)",
        "the ring ends with the sum on every rank",
        {"world_size": 2},
    ),
    "03_collectives: fewer bytes": (
        "torch.zeros(size_bytes // 4)",
        "torch.zeros(2**22 // size_bytes)",
        "and so does a byte",
        {"world_size": 2},
    ),
    "05_ddp_by_hand": (
        "    flat /= dist.get_world_size()\n",
        "",
        "the three ways end with equal weights",
        {"epochs": 1, "rounds": 5},
    ),
    "05_ddp_by_hand: few calls": (
        "seconds(average_each, plain)",
        "seconds(average_flat, plain)",
        "one by one takes at least three times as long",
        {"epochs": 1, "rounds": 20},
    ),
    "06_ddp": (IMPORT_DDP, NO_AVERAGING, "weights are equal on all ranks", {"epochs": 1}),
    "07_model_parallel": (
        "dist.send(received.grad, previous_rank)",
        "dist.send(received.grad / 2, previous_rank)",
        "cutting the network changes no number",
        {"steps": 12},
    ),
    "07_model_parallel: waiting counted": (
        """dist.recv(received, previous_rank)
            with clock("forward"):
""",
        """with clock("forward"):
                dist.recv(received, previous_rank)
""",
        "each stage waits for the other",
        {"steps": 12},
    ),
    "08_pipeline": (
        "gpipe, one_f_one_b = pipelining.ScheduleGPipe, pipelining.Schedule1F1B",
        'gpipe = pipelining.ScheduleGPipe\none_f_one_b = type("Schedule1F1B", (gpipe,), {})',
        "1F1B holds at most as many as stages",
        {"stage_ms": 20, "repeats": 1},
    ),
    "08_pipeline: slow stages": (
        "time.sleep(2 * context.forward_s)",
        "time.sleep(4 * context.forward_s)",
        "every point is within 25 % of formula and price",
        {"stage_ms": 40, "repeats": 1},
    ),
    "08_pipeline: another formula": (
        "on_device_clock(step, m) / ((m + p - 1)",
        "on_device_clock(step, m) / ((m + p)",
        "the order is worth what the formula says",
        {"stage_ms": 20, "repeats": 1},
    ),
    "09_sharding": (
        "found = take_steps(worker, model, optimizer, worker.rank, worker.world_size)",
        "found = take_steps(worker, model, optimizer, 0, worker.world_size)",
        "all end with DDP's weights",
        {"steps": 3},
    ),
    "10_compare": (
        "for strategy in [*strategies.values(), ByTheRoot]:",
        "ByTheRoot.communicate = lambda self: None\nfor strategy in [*strategies.values(), ByTheRoot]:",
        "by the root (mine) computes another step than one process",
        {"quick": True, "steps": 8},
    ),
    "11_scaling": (
        "share = split(batch, n)[worker.rank]",
        "share = batch // n",
        "no sample was lost here",
        {"steps": 1, "repeats": 1},
    ),
    "11_scaling: another batch": (
        "fitted.predict(point.ranks, point.batch_size)",
        "fitted.predict(point.ranks, batch_size)",
        "points held back are within 35 %",
        {"steps": 1, "repeats": 1},
    ),
    "12_when_parallel_equals_serial": ("total = all_reduce(mine)", "total = mine", "sums over all ranks do not"),
    "13_checkpoint": (
        "model=model, optimizer=optimizer, scheduler=scheduler",
        "model=model, scheduler=scheduler",
        "the resumed run ends with the bits of the run that was never killed",
    ),
    "14_when_it_hangs": (
        "sleep_s[worker.rank :: worker.world_size]",
        "sleep_s[worker.rank * steps :][:steps]",
        "dealt out, the ranks wait less",
    ),
    "15_outgrow_the_machine": (
        'on=on, seed=seed, name="torchrun"',
        'on=on, seed=seed + 1, name="torchrun"',
        "one fingerprint from all launchers and ranks, found 2",
        {"steps": 5},
    ),
    "16_pitfalls": (
        "model = nn.DataParallel(labkit.models",
        "model = DistributedDataParallel(labkit.models",
        "no symptom: ['DDP in name only']",
    ),
}
"""By lesson, and what is wrong with it where it is broken in several ways: what its code says, what it says when broken
on purpose, and what its closing assertion then says. And parameters for a quicker run, where there are any.
"""
WHOLE = {
    "15_outgrow_the_machine": "the script that one cell runs leaves files for the next",
    "16_pitfalls": "its exhibits are known by what a decorator notes",
}
"""Lessons whose closing assertion needs what cannot be seen from the names that its cells use."""


CELLS = """
n = 3  # parameters
----
import numpy as np
from math import pi
----
def double(value):
    return factor * value
----
factor = 2
----
other = np.zeros(n)
----
found = []
for i in range(n):
    found.append(double(i))
----
np.testing.assert_equal(1, 1)
other[0] = 5
----
if pi > 3:
    found[0] = 7
----
shown = found[:2]
----
assert other.sum() == 5, "of no interest here"
last = found[-1]
more = other
assert last == 4, f"the last is twice two: {last}"
"""


def test_a_slice_has_what_an_assertion_needs_and_no_more():
    cells = [nbformat.v4.new_code_cell(source) for source in CELLS.strip().split("\n----\n")]
    cells[0].metadata.tags = ["parameters"]
    notebook = nbformat.v4.new_notebook(cells=cells)
    sliced = [cell.source for cell in slice_for(notebook, "the last is twice two: 5").cells]
    assert sliced[:-1] == [cells[i].source for i in (0, 1, 2, 3, 5, 7)]
    assert sliced[-1].splitlines() == ["last = found[-1]", "assert last == 4, f'the last is twice two: {last}'"]
    exec("\n".join(sliced), {})
    assert len(notebook.cells) == len(cells), "the notebook itself stays"
    cells[3].source = "%ranks 1"
    assert slice_for(nbformat.v4.new_notebook(cells=cells), "the last is twice two").cells == cells, "on ranks: whole"


@pytest.mark.notebook
@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_lesson_is_red(broken, tmp_path, monkeypatch):
    """Only the cells that the assertion needs are run; all of them run above, where nothing is broken."""
    import papermill

    right, wrong, said, *parameters = BROKEN[broken]
    name = broken.partition(":")[0]
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    places = [cell for cell in notebook.cells if cell.cell_type == "code" and right in cell.source]
    assert places, f"{name} does not say {right!r}"
    for cell in places:
        cell.source = cell.source.replace(right, wrong)
    file = tmp_path / f"{name}.ipynb"
    nbformat.write(notebook if name in WHOLE else slice_for(notebook, said), file)
    # The cells that would have tidied up may not be among those that are run.
    with tempfile.TemporaryDirectory(prefix="cells-") as temporary:
        monkeypatch.setenv("TMPDIR", temporary)
        with pytest.raises(papermill.PapermillExecutionError, match=f"AssertionError: {re.escape(said)}"):
            execute(file, tmp_path / "out", *parameters)


@pytest.mark.cluster
@pytest.mark.notebook
def test_lesson_15_ends_with_the_same_weights_on_a_slurm_of_two_nodes(tmp_path):
    if why := cluster.missing():
        pytest.skip(why)
    with cluster.running() as slurm:
        executed = execute(FOLDER / "15_outgrow_the_machine.ipynb", tmp_path)
        assert slurm.jobs() == []
    (table,) = [output for cell, output in outputs(nbformat.read(executed, as_version=4)) if cell.id == "one-hash"]
    weights = dict(re.findall(r"^(\S.*?) +2 +([0-9a-f]{16})…", table.data["text/plain"], re.MULTILINE))
    assert list(weights) == ["labkit.launch", "torchrun", "torchrun, two nodes", "SLURM", "exported script"]
    assert len(set(weights.values())) == 1
