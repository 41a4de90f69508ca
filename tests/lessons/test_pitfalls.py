"""The museum of pitfalls: exhibits are whole, the notebooks show each as its file has it, mending keeps them green."""

from __future__ import annotations

import ast
import inspect
import json
import linecache
import re
import time
from pathlib import Path

import nbformat
import pytest
import torch.distributed as dist

import course
from course.exercises import progress
from course.mistakes import MISTAKES
from course.pitfalls import WINGS, Museum, find, museum, table
from course.pitfalls.base import Exhibit, Expected, OnEachRank, above, below, fault, near
from tests.support.tiers import few
from tests.tools.run_notebooks import FOLDER, execute

TABLE = table()
SOUNDS = [name for name, exhibit in TABLE.items() if exhibit.is_sound]


@pytest.mark.parametrize("name", TABLE)
def test_an_exhibit_is_whole(name):
    exhibit = TABLE[name]
    module = inspect.getmodule(exhibit.form)
    assert module.__name__ == f"course.pitfalls.{name}", "a file is named as its function"
    assert 2 <= len(exhibit.choices) <= 3
    assert len(set(exhibit.choices)) == len(exhibit.choices)
    assert exhibit.answer in exhibit.choices
    assert 40 < len(exhibit.story) < 900
    assert exhibit.why.endswith((".", ".)"))
    assert exhibit.hung.count("\n") < 30
    if not exhibit.is_sound:
        assert exhibit.gives is not None
        compile(exhibit.right_source, name, "exec")


def test_every_wing_has_mistakes_and_code_that_only_looks_wrong():
    assert len({exhibit.title for exhibit in TABLE.values()}) == len(TABLE) == 86
    assert len(SOUNDS) == 16
    for is_sound in (True, False):
        assert {each.wing for each in TABLE.values() if each.is_sound == is_sound} == set(WINGS)
    assert not {place.place for place in MISTAKES.values()} & set(SOUNDS), "a mistake's place shows a mistake"


def test_what_the_reader_sees_before_the_run_does_not_tell():
    telling = re.compile(
        r"\b(forgotten|wrong|right|mend|mended|nobody|never|mistake|no longer|too late)\b", re.IGNORECASE
    )
    told = {name: telling.findall(f"{each.title} {name.replace('_', ' ')}") for name, each in TABLE.items()}
    assert {name: words for name, words in told.items() if words} == {}
    assert [name for name, each in TABLE.items() if each.answer.lower() in each.title.lower()] == []


@pytest.mark.parametrize("wing", WINGS)
def test_a_wings_notebook_holds_each_exhibit_as_its_file_has_it(wing):
    cells = nbformat.read(FOLDER / f"{WINGS[wing]}.ipynb", as_version=4).cells
    assert sum(cell.cell_type == "code" for cell in cells) <= 25
    shown = {cell.id.replace("-", "_"): index for index, cell in enumerate(cells) if "museum.reveal(" in cell.source}
    shown.pop("how_it_works")
    assert set(shown) == {name for name, exhibit in TABLE.items() if exhibit.wing == wing}
    for name, place in shown.items():
        card, code = cells[place - 1 : place + 1]
        assert card.cell_type == "markdown", "read on a page before anything runs"
        assert code.source == TABLE[name].hung, "kept in the exhibit's file: python tests/tools/hang_exhibits.py"
        assert card.source == TABLE[name].card, "kept in the exhibit's file: python tests/tools/hang_exhibits.py"


def test_a_card_has_a_heading_the_story_the_choices_and_what_is_needed():
    card = find("address_of_srun").card
    assert card.startswith("### The address at which ranks meet\n\n[The text on ResNet-50")
    assert "\n\n* **a** yes\n* **b** no, and it fails at once\n* **c** no, but it tries again" in card
    assert card.endswith("\n\n*Needs Linux.*")
    assert find("three_epochs").hung.endswith('\n\n\nmuseum.reveal(three_epochs, prediction="")  # a, b or c')


@pytest.mark.parametrize(
    ("expected", "found", "told"),
    [
        (3, 3, ""),
        (3, 1, "found 1, expected 3"),
        ((64, 10), "an error", "found 'an error', expected (64, 10)"),
        (near(0.5, 0.1), 0.59, ""),
        (near(0.5, 0.1), 0.7, "found 0.7, expected 0.5, within 0.1"),
        (below(1e-9), float("nan"), "found nan, expected less than 1e-09"),
        (above(0), 0.0, "found 0.0, expected more than 0"),
        (above(0), None, "found None, expected more than 0"),
        (Expected("one", lambda found: found.count("1") == 1), "1", ""),
        (OnEachRank("all"), ["all", "all"], ""),
        (OnEachRank("all"), ["all", "half"], "rank 1: found 'half', expected 'all'"),
        (OnEachRank("all"), ["all"], "found ['all'], expected a list of 2 values, one for each rank"),
    ],
)
def test_a_fault_names_what_was_found_and_what_was_expected_and_the_rank(expected, found, told):
    assert fault(expected, found, 2) == told


@pytest.fixture
def data():
    opened = Museum("data", predictions={"three_epochs": "2", "images_into_linear": "c"})
    yield opened
    opened.close()


@pytest.fixture
def no_ranks(monkeypatch):
    """For exhibits that need none."""
    monkeypatch.setattr(Museum, "_reserve", lambda self: None)


@pytest.mark.usefixtures("no_ranks")
def test_the_run_decides_whether_the_answer_is_revealed(data, capsys):
    data.reveal(find("three_epochs").form)
    said = capsys.readouterr().out
    assert "The form gives: 1" in said
    assert "You said 2; it was 1: surprised?" in said
    assert "The right form gives: 3" in said
    assert "sampler.set_epoch(epoch)" in said
    assert "The sampler shuffles by seed + epoch" in said
    assert data.table().loc["A DistributedSampler over three epochs"].tolist() == [
        "silently wrong",
        "surprised?",
        "",
    ]
    (silent,) = [
        bar.x[list(bar.y).index("silently wrong")]
        for bar in data.scoreboard().data
        if bar.name == "predicted otherwise"
    ]
    assert silent == 1


@pytest.mark.usefixtures("no_ranks")
def test_a_form_that_the_reader_has_mended_is_no_fault_of_the_lesson(data, capsys):
    def three_epochs():
        return 3

    data.reveal(three_epochs)
    assert "Mended. It gives: 3" in capsys.readouterr().out
    assert data.mended == {"three_epochs"}

    def images_into_linear():
        return (64, 1)

    data.reveal(images_into_linear)
    assert "Not mended yet: found (64, 1), expected (64, 10)." in capsys.readouterr().out
    assert data.not_as_labelled == []
    assert set(data.outcomes) == {"three_epochs", "images_into_linear"}


@pytest.mark.usefixtures("no_ranks")
def test_the_unchanged_form_is_never_mended(data, capsys, monkeypatch):
    data.mend(find("three_epochs").form)
    assert "Not mended yet: the code is unchanged; found 1, expected 3." in capsys.readouterr().out
    monkeypatch.setattr(find("three_epochs"), "expects", 1)  # whatever it gives
    data.mend(find("three_epochs").form)
    assert "Not mended yet: the code is unchanged." in capsys.readouterr().out
    assert data.mended == set()
    data.reveal(find("three_epochs").form)
    assert "The exhibit did not show what its label says; expected: 1." in capsys.readouterr().out
    assert data.not_as_labelled == ["A DistributedSampler over three epochs"]


def test_the_code_of_a_cell_is_the_exhibits_own_as_long_as_no_line_of_it_is_changed(monkeypatch):
    exhibit = find("function_of_the_notebook")
    cells = {"as hung": exhibit.hung, "changed": exhibit.hung.replace("6 * 7", "42")}
    found = {}
    for file, text in cells.items():
        monkeypatch.setitem(linecache.cache, file, (len(text), None, text.splitlines(keepends=True), file))
        names = {"museum": type("Shown", (), {"reveal": staticmethod(lambda *_, **__: None)})}
        exec(compile(text, file, "exec"), names)
        found[file] = museum.is_as_hung(names[exhibit.name], exhibit)
    assert found == {"as hung": True, "changed": False}


@pytest.mark.usefixtures("no_ranks")
def test_mending_names_the_rank_and_the_error(data, capsys, monkeypatch):
    monkeypatch.setattr(data, "on_ranks", lambda function: ["first half, second half", "first half, "])

    def everybody_downloads(on_ranks):
        return on_ranks(None)

    data.mend(everybody_downloads)
    told = "rank 1: found 'first half, ', expected 'first half, second half'."
    assert f"Not mended yet: {told}" in capsys.readouterr().out

    def equal_parts():
        raise KeyError("rank")

    data.mend(equal_parts)
    assert "Not mended yet: KeyError: 'rank'." in capsys.readouterr().out

    def batch_of_128(pictures):
        return pictures

    data.mend(batch_of_128)
    assert "asks for 'pictures'; there are world_size, seed" in capsys.readouterr().out
    assert set(data.outcomes) == {"everybody_downloads", "equal_parts", "batch_of_128"}, "each counts as run"


@pytest.mark.usefixtures("no_ranks")
@pytest.mark.parametrize("waits", [lambda: time.sleep(60), lambda: [None for _ in iter(int, 1)]])
def test_a_form_that_does_not_end_is_stopped_and_told_so(data, capsys, monkeypatch, waits):
    monkeypatch.setattr(museum, "LIMIT_S", 0.2)

    def three_epochs():
        waits()

    data.mend(three_epochs)
    assert "Not mended yet: Stopped: three_epochs has not ended after 0.2 s" in capsys.readouterr().out


@pytest.mark.spawns
def test_ranks_that_wait_for_each_other_are_stopped_and_named_and_the_next_form_runs(data, capsys, monkeypatch):
    monkeypatch.setattr(museum, "RANKS_LIMIT_S", 2.0)

    def one_seed_for_all(on_ranks):
        return on_ranks(lambda worker: dist.barrier() if worker.rank == 0 else time.sleep(60))

    data.mend(one_seed_for_all)
    said = capsys.readouterr().out
    assert re.search(r"Not mended yet: .*rank [01]", said), said

    def num_workers_2(on_ranks):
        return sum(on_ranks(lambda worker: 0))

    data.close()  # as a lesson's closing cell does
    data.mend(num_workers_2)
    assert "Mended. It gives: 0" in capsys.readouterr().out


@pytest.mark.usefixtures("no_ranks")
def test_a_form_finds_nothing_that_its_first_run_has_left(capsys):
    with_folder, left = Museum("learning"), []

    def saved_to_checkpoint(folder):
        left.extend(folder.iterdir())
        (folder / "checkpoint").mkdir()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        return 0

    try:
        with_folder.mend(saved_to_checkpoint)
        with_folder.mend(saved_to_checkpoint)
        with_folder.close()
        with_folder.mend(saved_to_checkpoint)  # a task, after the closing cell
        assert left == []
        assert not dist.is_initialized()
        assert capsys.readouterr().out.count("Mended") == 3
    finally:
        with_folder.close()
    assert [folder for folder in with_folder.folders if folder.exists()] == []


@pytest.mark.usefixtures("no_ranks")
def test_code_that_only_looks_wrong_has_nothing_to_mend(data, capsys):
    data.reveal(find("samplers_of_one_seed").form, "a")
    said = capsys.readouterr().out
    assert "You said none; it was none: right" in said
    assert "All ranks must shuffle in the same way" in said
    data.mend(find("samplers_of_one_seed").form)
    assert "It is right, and was: there is nothing to mend." in capsys.readouterr().out

    def samplers_of_one_seed():
        return 25

    data.mend(samplers_of_one_seed)
    assert "No longer right: found 25, expected 0." in capsys.readouterr().out
    assert data.mended == set()


@pytest.mark.usefixtures("no_ranks")
def test_the_score_counts_predictions_of_mistakes_and_of_what_only_looks_wrong(data, capsys):
    assert data.score() == "no predictions made, of 17; 0 mended"
    data.reveal(find("three_epochs").form)
    data.reveal(find("three_epochs").form, "c")  # too late: the answer is out
    data.reveal(find("samplers_of_one_seed").form, "none")
    told = "0 of 1 about mistakes, 1 of 1 about code that only looks wrong"
    assert data.score() == f"1 of 2 predictions right, of 17 exhibits: {told}; 0 mended"
    capsys.readouterr()


def test_the_score_of_the_museum_is_that_of_all_first_predictions(monkeypatch):
    kept = {find("three_epochs").question: True, find("no_eval").question: False, "another lesson's": True}
    monkeypatch.setattr(progress, "load", lambda: {"predictions": kept})
    told = "1 of 1 about mistakes, 0 of 1 about code that only looks wrong"
    assert course.pitfalls.score() == f"1 of 2 predictions right, of 86 exhibits: {told}"


@pytest.mark.usefixtures("no_ranks")
def test_what_this_machine_lacks_is_said_and_skipped(data, capsys, monkeypatch):
    monkeypatch.setattr(Exhibit, "missing", property(lambda self: "2 GPUs"))
    data.reveal(find("partitioned_once").form)
    data.mend(find("partitioned_once").form)
    assert capsys.readouterr().out.count("Skipped: needs 2 GPUs.") == 2
    assert data.outcomes == {}
    assert data.to_show == []


@pytest.mark.usefixtures("no_ranks")
def test_a_name_that_does_not_exist_is_refused_with_those_that_do(data):
    with pytest.raises(
        ValueError, match="no exhibit 'no_address'; it is in 16a_pitfalls_starting; it has batch_of_128"
    ):
        data.reveal(find("no_address").form)
    with pytest.raises(ValueError, match="three_epochs: 'd' is no prediction; there are 'a' \\(3\\), 'b' \\(2\\), 'c'"):
        data.reveal(find("three_epochs").form, "d")
    with pytest.raises(ValueError, match="there is no wing 'west'; there are starting, machines"):
        Museum("west")
    with pytest.raises(ValueError, match="world_size must be at least 2, got 1"):
        Museum("data", world_size=1)
    with pytest.raises(ValueError, match="the wing 'data' has no group_0; it has"):
        Museum("data", predictions={"group_0": "c"})
    with pytest.raises(ValueError, match="there is no exhibit 'group_zero'; there are"):
        course.pitfalls.find("group_zero")
    with pytest.raises(ValueError, match="shows=3 of"):
        Exhibit("data", "No such choice", "", ("yes", "no"), shows=3, expects=0)


def closing_cell(lesson):
    (cell,) = [each for each in nbformat.read(FOLDER / f"{lesson}.ipynb", 4).cells if each.id == "did-it-work"]
    return cell.source


@pytest.fixture
def own_exhibit(monkeypatch):
    """An exhibit that a reader has written, in no notebook yet."""
    own = Exhibit("data", "My own", "", ("yes", "no"), shows=1, expects=0)
    own.broken(lambda: 1)
    monkeypatch.setattr(museum, "table", lambda: {**TABLE, "my_own": own})
    return own


@pytest.mark.usefixtures("no_ranks")
def test_an_exhibit_of_the_readers_own_leaves_its_wing_green(own_exhibit, data, capsys):
    assert "my_own" in data.exhibits
    shown = [name for name in data.to_show if name != "my_own"]
    data.outcomes.update((name, museum.Outcome(TABLE[name], True, True, None)) for name in shown)
    exec(closing_cell(WINGS["data"]), {"museum": data})
    assert "exhibits shown" in capsys.readouterr().out
    data.outcomes.pop("three_epochs")
    with pytest.raises(AssertionError, match="all were run that this machine can show"):
        exec(closing_cell(WINGS["data"]), {"museum": data})


def test_an_exhibit_of_the_readers_own_leaves_the_entrance_green(own_exhibit, monkeypatch, capsys):
    monkeypatch.chdir(FOLDER)
    exhibits = {**TABLE, "my_own": own_exhibit}
    mistakes = [each for each in exhibits.values() if not each.is_sound]
    names = {"json": json, "Path": Path, "wings": WINGS, "exhibits": exhibits, "MISTAKES": MISTAKES, "extends": False}
    exec(closing_cell("16_pitfalls"), {**names, "mistakes": mistakes, "here": exhibits, "silent": len(mistakes)})
    assert "yours: ['my_own']" in capsys.readouterr().out


TASKS = {
    "starting": {"no_address": ("environ, clear", 'environ, {"MASTER_ADDR": "127.0.0.1"}, clear')},
    "machines": {},
    "data": {},
    "learning": {"loss_of_an_epoch": ("split(500)", "split(400)"), "steps_of_sgd": ("range(782)", "range(2000)")},
    "gradients": {"one_call_per_tensor": ("range(80)", "range(200)")},
    "well_known": {},
}
"""What the lessons ask their readers to change, if not to mend, as text of an exhibit before and after."""


def mended_cell(exhibit):
    """The cell as a reader mends it: the right form in place of the broken one, and what it imports."""
    module = inspect.getmodule(exhibit.form)
    imports = [
        node for node in ast.parse(inspect.getsource(module)).body if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    lines = exhibit.cell.splitlines()
    last = ast.parse(exhibit.cell).body[-1]
    right = exhibit.right_source.replace("def right(", f"def {exhibit.name}(")
    used = [ast.unparse(node) for node in imports if getattr(node, "module", "") != "__future__"]
    return "\n".join([*used, *lines[: last.lineno - 1], right, f"museum.mend({exhibit.name})"])


@pytest.mark.notebook
@pytest.mark.parametrize("wing", few(WINGS, lambda wing: wing == "data"))
def test_a_lesson_in_which_each_task_is_done_is_green(wing, tmp_path):
    notebook = nbformat.read(FOLDER / f"{WINGS[wing]}.ipynb", as_version=4)
    mended = []
    for cell in notebook.cells:
        name = cell.id.replace("-", "_")
        if cell.cell_type != "code" or name not in TABLE or TABLE[name].is_sound:
            continue
        if task := TASKS[wing].get(name):
            assert task[0] in cell.source
            cell.source = cell.source.replace(*task)
        else:
            cell.source = mended_cell(TABLE[name])
            mended.append(cell.id)
    file = tmp_path / f"{WINGS[wing]}.ipynb"
    nbformat.write(notebook, file)
    executed = nbformat.read(execute(file, tmp_path / "out"), as_version=4)
    said = {cell.id: str(cell.get("outputs", "")) for cell in executed.cells}
    assert {
        name: said[name] for name in mended if "Mended. It gives" not in said[name] and "Skipped" not in said[name]
    } == {}
