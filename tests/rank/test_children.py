"""What a rank's own processes are sent: a DataLoader's workers, over what was typed in a cell."""

from __future__ import annotations

import os
import pickle
import sys
import types
from multiprocessing.reduction import ForkingPickler

import pytest

import labkit
from labkit.rank.script_compat import children
from tests.support.tiers import few

SESSION_RANKS = 1

METHODS = ("fork", "forkserver", "spawn")
"""How a DataLoader's workers may begin; the first is Python's default until 3.13, the second from 3.14 on."""

CELL = """
import os
from typing import NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset


class Sample(NamedTuple):
    image: torch.Tensor
    label: int


class Unreadable(ValueError):
    pass


class Images(Dataset):
    def __init__(self, spoilt=None):
        self.spoilt = spoilt

    def __len__(self):
        return 4

    def __getitem__(self, index):
        if index == self.spoilt:
            raise Unreadable(f"image {index}")
        return Sample(torch.full((2,), float(index)), os.getppid())


def load(worker, method):
    batches = list(DataLoader(Images(), 2, num_workers=1, multiprocessing_context=method))
    is_fork = batches[0].label[0] == os.getpid()
    return [batch.image.tolist() for batch in batches], all(type(batch) is Sample for batch in batches), is_fork


def load_all(worker, method):
    loaded = load(worker, method)
    try:
        list(DataLoader(Images(spoilt=1), 2, num_workers=1, multiprocessing_context=method))
    except Unreadable as error:
        return *loaded, str(error)
"""


@pytest.fixture(scope="module")
def cell():
    """What the cell defines, in a module of the name that a notebook's has."""
    found = types.ModuleType("__main__")
    exec(compile(CELL, "<cell>", "exec"), vars(found))
    return found


def unpickled(value):
    """Send a value as multiprocessing's queues do."""
    return pickle.loads(ForkingPickler.dumps(value))


@pytest.fixture
def by_value(monkeypatch):
    monkeypatch.setattr(ForkingPickler, "reducer_override", children._reduce, raising=False)


@pytest.mark.usefixtures("by_value")
def test_what_was_typed_in_a_cell_travels_to_a_process_that_does_not_have_it(cell):
    images = unpickled(cell.Images(3))
    assert (len(images), images.spoilt) == (4, 3)
    assert unpickled(cell.Sample(1, 2)) == (1, 2)
    assert unpickled(cell.load).__code__ == cell.load.__code__
    assert unpickled(lambda number: number + len(images))(1) == 5
    by_name = [pytest.fixture, os.getpid, dict]
    assert unpickled(by_name) == by_name


@pytest.mark.usefixtures("by_value")
def test_of_what_a_fork_has_too_it_is_the_forks_own(cell, monkeypatch):
    monkeypatch.setitem(sys.modules, "__main__", cell)  # as cells on reserved ranks have it
    assert unpickled(cell.Images) is cell.Images
    assert type(unpickled(cell.Sample(1, 2))) is cell.Sample


@pytest.mark.spawns
@pytest.mark.parametrize("method", few(METHODS, 2))
def test_a_data_loaders_workers_load_a_data_set_from_a_cell_however_they_begin(cell, ranks, method):
    run = labkit.launch(cell.load_all, method, on=ranks, live=False)
    images, are_the_same, is_fork, said = run.results[0]
    assert images == [[[0.0, 0.0], [1.0, 1.0]], [[2.0, 2.0], [3.0, 3.0]]]
    assert are_the_same, "what comes back is of the reader's own class"
    assert is_fork == (method != "forkserver")
    assert "image 1" in said
