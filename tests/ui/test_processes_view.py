"""`labkit.processes()`: what labkit holds, what it takes, and how to end it."""

from __future__ import annotations

import itertools
import os
import signal

import pytest

import labkit
from labkit.engines import standby
from labkit.ui.process_table import HEADINGS, holders
from labkit.ui.process_table.holders import HeldProcess
from tests.conftest import LONG_S, lives, wait_for_step, wait_until
from tests.support import workloads


@pytest.fixture
def spinning():
    run = labkit.launch(workloads.spin, wait=False, live=False, name="spinning")
    wait_for_step(run, 1)
    yield run
    run.stop()


@pytest.fixture
def stand_by():
    """Has two ranks stand by. Called in the test: pytest changes the environment before it, and new ones would come."""

    def two():
        standby.on(2)
        wait_until(lambda: len(standby.pids()) == 2, LONG_S)
        return standby.pids()

    yield two
    standby.off()


def test_where_nothing_is_held_it_says_so():
    held = labkit.processes()
    assert held == []
    assert repr(held) == held._repr_html_() == "labkit holds no process"


class Held:
    """A holder of processes that are none, started at any time."""

    pids = itertools.count(10**9)

    def __init__(self, kind, since_s_by_rank):
        self.kind, self.since_s_by_rank = kind, since_s_by_rank

    def processes(self):
        return [
            HeldProcess(self.kind, self.kind, rank, next(self.pids), since_s, "ready", self)
            for rank, since_s in self.since_s_by_rank.items()
        ]


def test_each_holders_ranks_are_listed_by_rank_whichever_started_first(monkeypatch):
    session, run, later = Held("session", {0: 5.2, 1: 5.1, 2: 9.0}), Held("run", {1: 7, 0: 8}), Held("run", {0: 7.5})
    monkeypatch.setattr(holders, "listed", lambda: [one for each in (run, later, session) for one in each.processes()])
    assert [(one.holder, one.rank) for one in labkit.processes()] == [
        *((run, rank) for rank in (0, 1)),
        (later, 0),
        *((session, rank) for rank in (0, 1, 2)),
    ]


@pytest.mark.cold  # what a rank takes by itself
@pytest.mark.spawns
def test_a_runs_ranks_are_listed_with_what_they_take_and_do(spinning):
    held = labkit.processes()
    assert [(one.kind, one.name, one.rank, one.pid, one.state) for one in held] == [
        ("run", "spinning", rank, spinning.pids[rank], "running") for rank in (0, 1)
    ]
    assert all(20e6 < one.memory_bytes < 1e9 for one in held)
    assert all(spinning.start_s - 1 < one.since_s <= spinning.start_s + spinning.elapsed_s for one in held)


@pytest.mark.spawns
def test_the_table_is_the_same_as_text_and_as_html(spinning):
    held = labkit.processes()
    rows = [line.split("  ") for line in repr(held).splitlines()]
    assert [part.strip() for part in rows[0] if part] == list(HEADINGS)
    for rank in (0, 1):
        assert f"run 'spinning', rank {rank}" in repr(held)
        assert f'<td style="text-align:left">{spinning.pids[rank]}</td>' in held._repr_html_()
    assert repr(held).splitlines()[-1] == held.total()
    assert held.total().startswith(f"2 in all, {sum(held.memory_bytes) / 1e6:,.0f} MB, at ")


@pytest.mark.spawns
def test_a_run_is_ended_as_a_whole_and_keeps_what_it_returned(spinning):
    labkit.processes()[1].end()
    spinning.wait()
    assert spinning.status == "stopped"
    assert spinning.results[0] == spinning.results[1] > 0
    assert labkit.processes() == []


@pytest.mark.spawns
def test_a_standby_rank_is_ended_alone(stand_by):
    ready = stand_by()
    held = labkit.processes()
    assert [(one.kind, one.rank, one.pid) for one in held] == [("standby", None, pid) for pid in ready]
    assert "stands by" in repr(held)
    held[0].end()
    assert standby.pids() == ready[1:]
    assert not lives(ready[0])
    held[0].end()  # gone already
    assert held[0].memory_bytes == 0


@pytest.mark.spawns
def test_one_that_was_killed_from_outside_is_not_listed(stand_by):
    ready = stand_by()
    os.kill(ready[1], signal.SIGKILL)
    wait_until(lambda: standby.pids() == ready[:1])
    assert [one.pid for one in labkit.processes()] == ready[:1]


@pytest.mark.spawns
def test_a_run_and_a_rank_that_stands_by_are_all_ended(stand_by):
    ready = stand_by()
    run = labkit.launch(workloads.spin, world_size=1, wait=False, live=False)
    wait_for_step(run, 1)
    held = labkit.processes()
    assert [(one.kind, one.pid) for one in held] == [("run", ready[0]), ("standby", ready[1])]
    for one in held:
        one.end()
    assert run.over.wait(LONG_S)
    assert not any(lives(one.pid) for one in held)
