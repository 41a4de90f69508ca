"""A job carries the cells that its function reaches, and no others."""

from __future__ import annotations

import linecache
import textwrap
from types import SimpleNamespace

import cloudpickle
import pytest

import labkit
from labkit import launcher
from labkit.engines import base
from labkit.protocol import packing
from labkit.ui import kernel
from tests.support.fake_engine import FakeEngine


def a_cell(monkeypatch, number, text, names):
    """Run a cell as IPython does."""
    file = f"/tmp/ipykernel_99999/{number}.py"
    text = textwrap.dedent(text)
    linecache.cache[file] = (len(text), None, text.splitlines(True), file)
    numbers = {**kernel.cell_numbers(), file: number}
    monkeypatch.setattr(kernel, "cell_numbers", lambda: numbers)
    exec(compile(text, file, "exec"), names)
    return file


@pytest.fixture
def cells(monkeypatch):
    names = {"__name__": "__main__", "labkit": labkit}
    files = [
        a_cell(monkeypatch, 1, "print_nothing = lambda: 'a secret of another cell'", names),
        a_cell(monkeypatch, 2, "def helper():\n    return 'helped'", names),
        a_cell(monkeypatch, 3, "class Model:\n    def forward(self):\n        return helper()", names),
        a_cell(monkeypatch, 4, "def train(worker):\n    return Model().forward()", names),
        a_cell(monkeypatch, 5, "def other(worker):\n    return 'something else'", names),
        a_cell(monkeypatch, 12, "def twelve(worker):\n    return 12", names),
    ]
    yield SimpleNamespace(names=names, files=files)
    for file in files:
        del linecache.cache[file]


class Target(base.Target):
    """Takes a job, and keeps it."""

    is_here, world_size = True, 2

    def engine(self, name, stall_s):
        self.taken = FakeEngine(2)
        self.taken.start = lambda job: setattr(self, "job", job)
        return self.taken


def test_a_job_carries_the_cells_that_its_function_reaches_and_no_others(cells):
    target = Target()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launcher, "show_run", lambda run, *_: run)
        run = labkit.launch(cells.names["train"], on=target, live=False)
    run.kill()
    assert [cell.title for cell in target.job.cells.values()] == ["Cell In[2]", "Cell In[3]", "Cell In[4]"]
    assert b"a secret of another cell" not in cloudpickle.dumps(target.job)
    assert b"something else" not in cloudpickle.dumps(target.job)


def test_cells_are_told_apart_by_their_whole_names(cells):
    pickled = packing.pack_call(cells.names["twelve"], (), {}).head
    assert list(kernel.cells(pickled)) == [cells.files[-1]], "and not Cell In[1]"
    assert list(kernel.cells()) == cells.files
