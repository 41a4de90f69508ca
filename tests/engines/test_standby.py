"""Ranks that stand by: used once and as good as new ones, there when they help and gone when they do not."""

from __future__ import annotations

import os
import signal
import sys
import time
from types import SimpleNamespace

import pytest
import torch

import labkit
from labkit.engines import standby
from tests.conftest import LONG_S, lives, wait_until
from tests.support import workloads

pytestmark = pytest.mark.spawns


@pytest.fixture(autouse=True)
def is_on(monkeypatch):
    """Ranks stand by, and the notebook seems to have no work of its own."""
    idle = SimpleNamespace(monotonic=time.monotonic, process_time=lambda: 0.0)
    monkeypatch.setattr(standby.idle, "time", idle)
    standby.on()
    yield
    standby.off()


def stand_by(count):
    """Have so many ranks stand by, as after a run of so many; give their pids."""
    standby.take(0)
    standby.done(count)
    wait_until(lambda: len(standby.pids()) == count)
    return standby.pids()


def assert_stays(condition, for_s=1.0):
    """Look again and again for a while whether something stays so."""
    deadline = time.monotonic() + for_s
    while time.monotonic() < deadline:
        assert condition()
        time.sleep(0.02)


def pid_of(worker):
    return os.getpid()


def pids_of_a_run(**options):
    return labkit.launch(pid_of, live=False, **options).results


# Used once


def test_each_run_gets_the_ranks_that_stood_by_and_never_one_that_was_used():
    seen = set(pids_of_a_run())
    for _ in range(2):
        wait_until(lambda: len(standby.pids()) == 2)
        ready = standby.pids()
        assert not seen & set(ready)
        assert pids_of_a_run() == ready
        assert not any(map(lives, ready)), "used once"
        seen |= set(ready)


def draw(worker, own_seed=None):
    if own_seed is not None:
        torch.manual_seed(own_seed)
    layer = torch.nn.Linear(2, 2)
    return os.getpid(), (layer.weight.tolist(), torch.randperm(10).tolist(), *workloads.random_numbers(worker))


@pytest.mark.cold
def test_random_numbers_are_those_of_a_rank_that_starts_cold():
    (cold,) = labkit.launch(draw, world_size=1, seed=0, live=False).results
    (ready,) = stand_by(1)
    wait_until(standby.warm, LONG_S)
    (warm,) = labkit.launch(draw, world_size=1, seed=0, live=False).results
    assert warm[0] == ready
    assert warm[1] == cold[1]


# As the notebook is now


def surroundings(worker):
    return os.environ.get("LABKIT_TEST"), os.getcwd(), sys.path[0]


def test_what_changes_in_the_notebook_is_seen_by_the_next_launch(monkeypatch, tmp_path):
    ready = stand_by(1)
    monkeypatch.setenv("LABKIT_TEST", "changed")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    run = labkit.launch(surroundings, world_size=1, live=False)
    assert run.results == [(os.environ.get("LABKIT_TEST"), os.getcwd(), sys.path[0])]
    assert not any(map(lives, ready)), "they would not have seen it"


# While they still import


@pytest.mark.cold
def test_a_run_takes_those_that_still_import_rather_than_start_others():
    ready = stand_by(2)
    assert not standby.warm()
    assert pids_of_a_run() == ready


# More, fewer, dead


def test_a_smaller_run_takes_some_and_a_greater_one_starts_the_rest():
    ready = stand_by(2)
    assert pids_of_a_run(world_size=1) == ready[:1]
    wait_until(lambda: standby.pids() == ready[1:])
    assert_stays(lambda: standby.pids() == ready[1:], for_s=0.5)
    run = labkit.launch(workloads.where_am_i, world_size=3, live=False)
    assert [result["rank"] for result in run.results] == [0, 1, 2]
    assert [result["sum"] for result in run.results] == [3, 3, 3]
    assert run.results[0]["pid"] == ready[1]
    wait_until(lambda: len(standby.pids()) == 3)


def test_a_rank_that_was_killed_while_it_stood_by_is_replaced():
    ready = stand_by(2)
    os.kill(ready[0], signal.SIGKILL)
    wait_until(lambda: standby.pids() == ready[1:])  # its last thread has ended, too
    used = pids_of_a_run()
    assert used[0] == ready[1]
    assert used[1] not in ready


# When they come and go


def test_none_is_started_while_a_run_is_going():
    going = labkit.launch(workloads.spin, wait=False, live=False)
    assert pids_of_a_run(world_size=1)
    assert_stays(lambda: standby.pids() == [])
    going.stop()
    wait_until(lambda: len(standby.pids()) == 2)


@pytest.mark.parametrize("world_size", [0, 1.5, True, "2"])
def test_a_number_of_ranks_that_is_none_is_refused(world_size):
    with pytest.raises(ValueError, match=r"world_size is a whole number of ranks, at least 1; got"):
        standby.on(world_size)


def test_those_that_wait_for_long_are_let_go(monkeypatch):
    monkeypatch.setattr(standby, "KEEP_S", 2.0)
    ready = stand_by(1)
    wait_until(lambda: standby.pids() == [])
    assert not any(map(lives, ready))
    assert pids_of_a_run(world_size=1) != ready


def test_switched_off_those_there_are_end_and_none_follows():
    ready = stand_by(2)
    standby.off()
    assert standby.pids() == []
    assert not any(map(lives, ready))
    assert set(pids_of_a_run(world_size=1)).isdisjoint(ready)
    assert_stays(lambda: standby.pids() == [], for_s=0.5)
