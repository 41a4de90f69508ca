"""What a run needs of whatever carries its ranks: the same tests for local processes, SLURM and Ray."""

from __future__ import annotations

import math
import os
import pickle
import shutil
import time
from itertools import pairwise

import psutil
import pytest
import torch

import labkit
from labkit.engines.local import LocalEngine
from labkit.launchers import job_events
from labkit.protocol import events
from labkit.protocol.job import Job
from labkit.protocol.packing import pack_call, unpack
from labkit.rank import recorder
from tests.conftest import LONG_S, shared_session, wait_until
from tests.support import elsewhere, workloads
from tests.support.agents import Agents

pytestmark = pytest.mark.spawns

ON_FILES = ["agents", pytest.param("slurm", marks=[pytest.mark.cluster, pytest.mark.wide])]
"""Those whose ranks speak with the notebook through a folder."""

ENGINES = {
    "agents": lambda request, folder: Agents(folder=folder).engine("contract", None),
    "local": lambda request, folder: LocalEngine(2),
    "session": lambda request, folder: request.getfixturevalue("reserved").engine("contract", None),
    "slurm": lambda request, folder: (
        request.getfixturevalue("slurm") and labkit.Slurm(2, 1, folder=folder).engine("contract", None)
    ),
    "ray": lambda request, folder: labkit.Ray(
        2, address=request.getfixturevalue("ray_cluster").address, placement="STRICT_SPREAD"
    ).engine("contract", None),
}


@pytest.fixture(scope="module")
def reserved():
    with shared_session(2) as ranks:
        yield ranks


class Started:
    """An engine that has started a function on two ranks, and what has come from them."""

    def __init__(self, engine, fn, *args):
        self.engine, self.events = engine, []
        engine.start(a_job(fn, *args)._replace(is_here=isinstance(engine, LocalEngine)))

    def of(self, kind, rank=None):
        return [event for event in self.events if isinstance(event, kind) and rank in (None, event.rank)]

    def until(self, condition):
        def met():
            self.events += self.engine.poll(0.05)
            return condition()

        wait_until(met, LONG_S)

    def until_over(self):
        self.until(lambda: len(self.of(events.Exit)) >= 2)

    def until_both_log(self):
        self.until(lambda: {event.rank for event in self.of(events.Log)} == {0, 1})

    def values(self, name, rank):
        return [
            event.values[event.names.index(name) + call * len(event.names)]
            for event in self.of(events.Log, rank)
            for call in range(len(event.steps))
        ]


def a_job(fn, *args):
    function = pack_call(fn, args, {})
    return Job(function, 2, "gloo", 0, 1, seed=0, port=0, start_s=time.time(), environment={}, cells={})


@pytest.fixture
def folder(tmp_path):
    """Where the runs' folders are made."""
    return tmp_path / "runs"


@pytest.fixture(params=["local", "session", *ON_FILES, pytest.param("ray", marks=pytest.mark.wide)])
def start(request, folder):
    """Start a function on the engine; whatever it has started is ended."""
    started = []
    if request.param == "ray":  # before this, so that it is looked at after what was started has been closed
        request.getfixturevalue("ray_cluster")

    def start(fn, *args):
        started.append(Started(ENGINES[request.param](request, folder), fn, *args))
        return started[-1]

    yield start
    for one in started:
        one.engine.kill()
        one.until_over()
        one.engine.close()


def test_events_come_in_the_order_of_each_rank_and_its_exit_comes_last(start):
    run = start(elsewhere.log_and_print)
    run.until_over()
    for rank in (0, 1):
        mine = [event for event in run.events if event.rank == rank]
        order = [type(event).__name__ for event in mine]
        assert order[-1] == "Exit"
        assert "Started" in order, run.events
        assert order.index("Started") < order.index("Log") < order.index("Result") < order.index("Exit")
        assert order.count("Exit") == 1
        assert run.values("loss", rank) == [0.0, 1.0, 2.0, 3.0, 4.0]
        times_s = [at_s for event in run.of(events.Log, rank) for at_s in event.times_s]
        assert all(before <= after for before, after in pairwise(times_s))
        assert "before\n" in "".join(event.text for event in run.of(events.Output, rank))
        assert mine[-1].code == 0
        assert not run.engine.killed(rank)
    assert run.engine.poll(0) == [], "nothing comes after the exits"


def test_a_failure_names_its_rank_and_the_other_is_not_blamed(start):
    run = start(elsewhere.raise_on_one)
    run.until(lambda: run.of(events.Failure))
    run.engine.kill()
    run.until_over()
    (failure,) = run.of(events.Failure)
    assert (failure.rank, failure.summary) == (1, "ValueError: bad batch")
    assert 'raise ValueError("bad batch")' in failure.traceback
    assert run.engine.killed(0)
    assert all(event.code != 0 for event in run.of(events.Exit))


def test_ranks_say_where_they_stand_and_stop_at_a_common_step(start):
    run = start(workloads.spin)
    run.until_both_log()
    assert run.engine.ask_for_stacks() == [0, 1]
    run.until(lambda: all("in spin" in "".join(event.text for event in run.of(events.Stack, rank)) for rank in (0, 1)))
    run.until(lambda: {event.rank for event in run.of(events.Answered)} == {0, 1})
    answers = run.of(events.Attached)
    assert {event.kind for event in answers} == {"collectives", "threads"}
    said = [recorder.Collectives(*pickle.loads(event.blob)) for event in answers if event.kind == "collectives"]
    assert {call[2] for each in said for call in each.calls} == {"barrier"}
    run.engine.ask_to_stop()
    run.engine.ask_to_stop()
    run.until_over()
    assert [event.code for event in run.of(events.Exit)] == [0, 0]
    first, second = run.values("loss", 0), run.values("loss", 1)
    assert first == second
    assert len(run.of(events.Result)) == 2


def test_what_is_ended_twice_and_closed_twice_is_gone(start):
    run = start(elsewhere.keep_logging)
    run.until_both_log()
    processes = [psutil.Process(int(run.values("pid", rank)[0])) for rank in (0, 1)]
    for _ in range(2):
        run.engine.kill()
    run.until_over()
    assert [run.engine.killed(rank) for rank in (0, 1)] == [True, True]
    for _ in range(2):
        run.engine.close()
    wait_until(lambda: not any(process.is_running() for process in processes))
    assert run.engine.poll(0) == []


# What is large, and what is odd


def test_nothing_a_result_of_50_mb_100_mb_of_output_and_nan_arrive(start):
    sizes = (0, 50_000_000)
    run = start(elsewhere.carry_much, sizes)
    run.until_over()
    assert [event.code for event in run.of(events.Exit)] == [0, 0]
    for rank, size in enumerate(sizes):
        (result,) = run.of(events.Result, rank)
        value = unpack(result.value)
        assert len(value) == size
        assert value == elsewhere.pattern(rank, size)
        assert all(map(math.isnan, run.values("loss", rank)))
        assert run.values("up", rank) + run.values("down", rank) == [math.inf] * 3 + [-math.inf] * 3
    text = "".join(event.text for event in run.of(events.Output, 1))
    lines = [line for line in text.splitlines() if line.startswith("line ")]
    assert lines == [elsewhere.line(number) for number in range(elsewhere.LINES)]
    kinds = [type(event) for event in run.events if event.rank == 1]
    assert kinds[-1] is events.Exit, "also after all that was printed"


def test_a_tensor_that_travels_costs_a_rank_its_size_once_at_rest_and_twice_at_most_as_it_is_read(start):
    size, taken = 200_000_000, {}
    for count in (1, size // 4):
        run = start(elsewhere.hold, torch.ones(count))
        run.until_over()
        run.engine.close()
        taken[count] = [(run.values("held", rank)[0], run.values("peak", rank)[0]) for rank in (0, 1)]
    for small, large in zip(*taken.values(), strict=True):
        held, peak = (after - before for before, after in zip(small, large, strict=True))
        assert 0.9 * size < held < 1.1 * size
        assert peak < 2.1 * size, "a job in a file is read whole before it is unpickled"


def test_a_result_that_cannot_be_pickled_is_a_failure_of_its_rank_and_the_others_arrives(start):
    run = start(elsewhere.return_a_lock, 1_000_000)
    run.until(lambda: run.of(events.Failure) and run.of(events.Result))
    run.engine.kill()
    run.until_over()
    (failure,), (result,) = run.of(events.Failure), run.of(events.Result)
    assert (failure.rank, failure.during) == (1, "sending the result")
    assert "the function returned a lock that cannot be sent to the notebook" in failure.summary
    assert unpack(result.value) == elsewhere.pattern(0, 1_000_000)


# What happens to the folder


@pytest.mark.parametrize("kind", ON_FILES)
def test_a_disk_that_is_full_for_a_while_ends_no_training_and_loses_nothing(kind, small_disk, request):
    run = Started(ENGINES[kind](request, small_disk / "runs"), elsewhere.fill_the_disk, small_disk / "filling")
    try:
        run.until(lambda: run.of(events.Warned))
        assert "is full: the ranks wait" in run.of(events.Warned)[0].text
        os.unlink(small_disk / "filling")
        run.until_over()
        assert [event.code for event in run.of(events.Exit)] == [0, 0]
        for rank in (0, 1):
            assert sorted(run.values("loss", rank)) == [float(step) for step in range(elsewhere.STEPS)]
            (result,) = run.of(events.Result, rank)
            assert unpack(result.value) == elsewhere.pattern(rank, 1_000_000)
    finally:
        run.engine.kill()
        run.until_over()
        run.engine.close()


@pytest.mark.parametrize("kind", ON_FILES)
def test_a_folder_that_is_deleted_meanwhile_ends_the_ranks_and_is_named(kind, folder, request):
    run = Started(ENGINES[kind](request, folder), elsewhere.keep_logging)
    try:
        run.until_both_log()
        processes = [psutil.Process(int(run.values("pid", rank)[0])) for rank in (0, 1)]
        (runs,) = (path for path in folder.iterdir() if path.is_dir())
        wait_until(lambda: shutil.rmtree(runs, ignore_errors=True) or not runs.exists())  # ranks may yet write there
        run.until_over()
        (ended,) = run.of(job_events.JobEnded)
        assert f"folder {run.engine.folder} has gone" in f"{ended.headline} {ended.cause}"
        assert run.events.index(ended) < run.events.index(run.of(events.Exit)[0])
        assert all(event.ended for event in run.of(events.Exit))
    finally:
        run.engine.kill()
        run.engine.close()
    wait_until(lambda: not any(process.is_running() for process in processes))
