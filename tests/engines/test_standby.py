"""Ranks that stand by: used once and as good as new ones, there when they help and gone when they do not."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch

import labkit
from labkit.engines import standby
from tests.conftest import LONG_S, lives, wait_until
from tests.support import workloads

pytestmark = pytest.mark.spawns


@pytest.fixture
def machine(monkeypatch):
    """The notebook's own work, as standby sees it: none, until a test says otherwise."""
    load = {"share": 0.0}
    used_s = SimpleNamespace(monotonic=time.monotonic, process_time=lambda: load["share"] * time.monotonic())
    monkeypatch.setattr(standby.idle, "time", used_s)
    assert standby._runs == 0, "an earlier test's run is still going"
    standby.on()
    yield load
    standby.off()


def stand_by(count):
    """Have so many ranks stand by, as after a run of so many; give their pids."""
    standby.take(0)
    standby.done(count)
    wait_until(lambda: len(standby.pids()) == count)
    return standby.pids()


def wait_until_warm(pids):
    """Wait until the ranks that stand by say that they have imported all they want to."""
    assert standby.pids() == pids
    wait_until(standby.warm, LONG_S)


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


def test_each_run_gets_the_ranks_that_stood_by_and_never_one_that_was_used(machine):
    seen = set(pids_of_a_run())
    for _ in range(2):
        wait_until(lambda: len(standby.pids()) == 2)
        ready = standby.pids()
        assert not seen & set(ready)
        assert pids_of_a_run() == ready
        assert not any(map(lives, ready)), "used once"
        seen |= set(ready)


def leave_traces(worker):
    """Change all that a process has, and give what was found before."""
    found = (
        hasattr(torch, "labkit_trace"),
        os.environ.get("TRACE"),
        os.getcwd(),
        "/trace" in sys.path,
        torch.get_num_threads(),
        torch.get_default_dtype(),
        sorted(t.name for t in threading.enumerate()),
    )
    torch.labkit_trace = True
    os.environ["TRACE"] = "left"
    os.chdir("/")
    sys.path.append("/trace")
    torch.set_num_threads(7)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(99)
    threading.Thread(target=time.sleep, args=(100,), daemon=True).start()
    return found


def test_nothing_of_an_earlier_run_is_seen(machine):
    first = labkit.launch(leave_traces, live=False).results
    wait_until(lambda: len(standby.pids()) == 2)
    ready = standby.pids()
    second = labkit.launch(leave_traces, live=False).results
    assert not any(map(lives, ready)), "they were used"
    assert first == second
    assert first[0][:2] == (False, None)


def draw(worker, own_seed=None):
    if own_seed is not None:
        torch.manual_seed(own_seed)
    layer = torch.nn.Linear(2, 2)
    return os.getpid(), (layer.weight.tolist(), torch.randperm(10).tolist(), *workloads.random_numbers(worker))


@pytest.mark.cold
def test_random_numbers_are_those_of_a_rank_that_starts_cold(machine):
    (cold,) = labkit.launch(draw, world_size=1, seed=0, live=False).results
    (ready,) = stand_by(1)
    wait_until_warm([ready])
    (warm,) = labkit.launch(draw, world_size=1, seed=0, live=False).results
    assert warm[0] == ready
    assert warm[1] == cold[1]


# As the notebook is now


def surroundings(worker):
    return os.environ.get("LABKIT_TEST"), os.getcwd(), sys.path[0]


def test_what_changes_in_the_notebook_is_seen_by_the_next_launch(machine, monkeypatch, tmp_path):
    ready = stand_by(1)
    monkeypatch.setenv("LABKIT_TEST", "changed")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    run = labkit.launch(surroundings, world_size=1, live=False)
    assert run.results == [(os.environ.get("LABKIT_TEST"), os.getcwd(), sys.path[0])]
    assert not any(map(lives, ready)), "they would not have seen it"


# While they still import


@pytest.mark.cold
def test_a_run_takes_those_that_still_import_rather_than_start_others(machine):
    ready = stand_by(2)
    assert not standby.warm()
    assert pids_of_a_run() == ready


# More, fewer, dead


def test_a_smaller_run_takes_some_and_a_greater_one_starts_the_rest(machine):
    ready = stand_by(2)
    assert pids_of_a_run(world_size=1) == ready[:1]
    wait_until(lambda: standby.pids() == ready[1:])
    assert_stays(lambda: standby.pids() == ready[1:], for_s=0.5)
    run = labkit.launch(workloads.where_am_i, world_size=3, live=False)
    assert [result["rank"] for result in run.results] == [0, 1, 2]
    assert [result["sum"] for result in run.results] == [3, 3, 3]
    assert run.results[0]["pid"] == ready[1]
    wait_until(lambda: len(standby.pids()) == 3)


def test_a_rank_that_was_killed_while_it_stood_by_is_replaced(machine):
    ready = stand_by(2)
    os.kill(ready[0], signal.SIGKILL)
    wait_until(lambda: standby.pids() == ready[1:])  # its last thread has ended, too
    used = pids_of_a_run()
    assert used[0] == ready[1]
    assert used[1] not in ready


# When they come and go


def test_none_is_started_while_a_run_is_going(machine):
    going = labkit.launch(workloads.spin, wait=False, live=False)
    assert pids_of_a_run(world_size=1)
    assert_stays(lambda: standby.pids() == [])
    going.stop()
    wait_until(lambda: len(standby.pids()) == 2)


@pytest.mark.parametrize("world_size", [0, 1.5, True, "2"])
def test_a_number_of_ranks_that_is_none_is_refused(world_size):
    with pytest.raises(ValueError, match=r"world_size is a whole number of ranks, at least 1; got"):
        standby.on(world_size)


def test_those_that_wait_for_long_are_let_go(machine, monkeypatch):
    monkeypatch.setattr(standby, "KEEP_S", 2.0)
    ready = stand_by(1)
    wait_until(lambda: standby.pids() == [])
    assert not any(map(lives, ready))
    assert pids_of_a_run(world_size=1) != ready


def test_switched_off_those_there_are_end_and_none_follows(machine):
    ready = stand_by(2)
    standby.off()
    assert standby.pids() == []
    assert not any(map(lives, ready))
    assert set(pids_of_a_run(world_size=1)).isdisjoint(ready)
    assert_stays(lambda: standby.pids() == [], for_s=0.5)
