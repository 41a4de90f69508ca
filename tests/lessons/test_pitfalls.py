"""The museum of pitfalls: exhibits are whole, the notebooks show each as its file has it, a run decides the answer."""

from __future__ import annotations

import inspect
import re

import nbformat
import pytest

import course
from course.pitfalls import WINGS, Museum, find, table
from course.pitfalls.base import Exhibit
from tests.tools.run_notebooks import FOLDER

TABLE = table()


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
    assert "assert " in exhibit.right_source, "the right form says what it promises"
    assert exhibit.cell.count("\n") < 30
    compile(exhibit.right_source, name, "exec")


def test_the_titles_differ_and_every_wing_has_exhibits():
    assert len({exhibit.title for exhibit in TABLE.values()}) == len(TABLE) == 70
    assert {exhibit.wing for exhibit in TABLE.values()} == set(WINGS)


@pytest.mark.parametrize("wing", WINGS)
def test_a_wings_notebook_holds_each_exhibit_as_card_code_and_reveal(wing):
    notebook = nbformat.read(FOLDER / f"{WINGS[wing]}.ipynb", as_version=4)
    cells = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    shown = [re.fullmatch(r'museum\.card\("(\w+)"\)', source) for source in cells]
    places = {match[1]: index for index, match in enumerate(shown) if match}
    assert set(places) == {name for name, exhibit in TABLE.items() if exhibit.wing == wing}
    for name, place in places.items():
        assert cells[place + 1] == TABLE[name].cell, (
            "kept once, in the exhibit's file: python tests/tools/hang_exhibits.py"
        )
        assert cells[place + 2] == f"museum.reveal({name})"


@pytest.fixture
def museum():
    opened = Museum("data", predictions={"three_epochs": "2", "images_into_linear": "an error about shapes"})
    yield opened
    opened.close()


@pytest.fixture
def no_ranks(monkeypatch):
    """For exhibits that need none."""
    monkeypatch.setattr(Museum, "_reserve", lambda self: None)


@pytest.mark.usefixtures("no_ranks")
def test_the_run_decides_whether_the_answer_is_revealed(museum, capsys):
    museum.card("three_epochs")
    museum.reveal(find("three_epochs").form)
    said = capsys.readouterr().out
    assert "The broken form gives: 1" in said
    assert "You said 2; it was 1: surprised?" in said
    assert "The right form gives: 3" in said
    assert "sampler.set_epoch(epoch)" in said
    assert "The sampler shuffles by seed + epoch" in said

    def images_into_linear():  # mended by the reader
        return (64, 10)

    museum.reveal(images_into_linear)
    said = capsys.readouterr().out
    assert "The mistake does not show; expected: an error about shapes" in said
    assert "it was" not in said
    assert museum.without_symptom == ["An image is not a row"]
    row = museum.table().loc["set_epoch, forgotten"]
    assert row.tolist() == ["wrong, in silence", "surprised?"]
    (silent,) = [
        bar.x[list(bar.y).index("wrong, in silence")]
        for bar in museum.scoreboard().data
        if bar.name == "predicted otherwise"
    ]
    assert silent == 1


@pytest.mark.usefixtures("no_ranks")
def test_an_error_is_a_symptom_only_where_the_exhibit_is_one_that_fails(museum, capsys):
    def three_epochs():
        raise ValueError("1")

    museum.reveal(three_epochs)
    assert "The mistake does not show" in capsys.readouterr().out

    def images_into_linear(pictures):
        return pictures

    museum.reveal(images_into_linear)
    assert "asks for 'pictures'; there are world_size, seed" in capsys.readouterr().out


@pytest.mark.usefixtures("no_ranks")
def test_what_this_machine_lacks_is_said_and_skipped(museum, capsys, monkeypatch):
    monkeypatch.setattr(Exhibit, "missing", property(lambda self: "2 GPUs; here: 0"))
    museum.card("partitioned_once")
    museum.reveal(find("partitioned_once").form)
    said = capsys.readouterr().out
    assert said.count("skipped: needs 2 GPUs; here: 0") == 2
    assert museum.outcomes == {}
    assert museum.to_show == []


@pytest.mark.usefixtures("no_ranks")
def test_who_asks_for_what_is_not_there_is_told_what_there_is(museum):
    with pytest.raises(
        ValueError, match="no exhibit 'no_address'; it is in 16a_pitfalls_starting; it has batch_of_128"
    ):
        museum.card("no_address")
    with pytest.raises(ValueError, match="there is no wing 'west'; there are starting, machines"):
        Museum("west")
    with pytest.raises(ValueError, match="world_size must be at least 2, got 1"):
        Museum("data", world_size=1)
    with pytest.raises(ValueError, match="the wing 'data' has no group_0; it has"):
        Museum("data", predictions={"group_0": "an error"})
    with pytest.raises(ValueError, match="there is no exhibit 'group_zero'; there are"):
        course.pitfalls.find("group_zero")
    with pytest.raises(ValueError, match="shows=3 of"):
        Exhibit("data", "No such choice", "", ("yes", "no"), shows=3)
