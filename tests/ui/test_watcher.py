"""Last charts keep no launch waiting, and are there when the cell ends if nobody takes what comes later."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from labkit.ui import kernel, watcher
from tests.conftest import LONG_S


class Shell:
    """As much of IPython's as is asked for."""

    def __init__(self):
        self.registered = set()
        self.events = SimpleNamespace(register=lambda event, function: self.registered.add((event, function)))

    def end_cell(self):
        for event, function in self.registered:
            assert event == "post_run_cell"
            function(None)


@pytest.fixture
def shell(monkeypatch):
    made = Shell()
    monkeypatch.setattr(kernel, "shell", lambda: made)
    return made


class Drawing(watcher.Watcher):
    """Draws when it is its turn, into a list."""

    def __init__(self, drawn, number=0, is_over=True):
        super().__init__(SimpleNamespace(over=threading.Event(), name="train", error=None))
        self.drawn, self.number = drawn, number
        if is_over:
            self._run.over.set()

    def _show(self):
        self._run.over.wait(LONG_S)

    def _show_plainly(self, text):
        self.drawn.append(text)

    def _show_last(self):
        self.drawn.append(self.number)


def test_the_end_of_a_cell_waits_for_no_run_that_goes_on(shell, monkeypatch):
    monkeypatch.setattr(kernel, "is_interactive", lambda: False)
    drawn = []
    view = Drawing(drawn, is_over=False)
    view.begin()
    shell.end_cell()
    assert view.is_alive()
    assert not drawn
    view._run.over.set()
    view.join(LONG_S)
    assert drawn == [0]


def test_one_that_cannot_be_shown_keeps_neither_its_cell_nor_the_next_chart(shell, monkeypatch, caplog):
    monkeypatch.setattr(kernel, "is_interactive", lambda: False)
    drawn = []
    broken, sound = Drawing(drawn, 1), Drawing(drawn, 2)
    broken._show = lambda: 1 / 0
    for each in (broken, sound):
        each.begin()
        each.finish()
    shell.end_cell()
    assert "train" in drawn[0], "in a few words how it ended"
    assert sorted(drawn[1:]) == [1, 2]
    assert [record.message for record in caplog.records] == ["run 'train' could not be shown. It is not affected"]
