"""How a run is followed: its deadlines, and errors that are no rank's. No process is started."""

from __future__ import annotations

import threading
import time
from array import array
from types import SimpleNamespace

import pytest

from labkit import launcher
from labkit.monitor import going as going_runs
from labkit.monitor import run as monitor_run
from labkit.monitor.run import Run, WorkerFailed
from labkit.protocol import events
from tests.conftest import LONG_S, wait_until
from tests.fake_engine import A_JOB, FakeEngine

JOB = A_JOB._replace(start_s=time.time())


def going(engine, **options):
    """A run whose ranks have begun."""
    run = Run(engine, engine.world_size, "train", **options)
    for rank in range(engine.world_size):
        engine.arrived.put(events.Started(rank))
    run.start(JOB._replace(start_s=time.time()))
    wait_until(lambda: run.states == ["running"] * engine.world_size, LONG_S)
    return run


def logged(rank, step=0):
    return events.Log(rank, ("loss",), array("q", [step]), array("d", [0.1]), array("d", [1.0]))


def test_an_error_of_labkits_own_is_the_runs_error_and_what_had_come_is_kept():
    engine = FakeEngine()
    run = going(engine)
    engine.arrived.put(logged(0))
    engine.arrived.put(OSError(28, "No space left on device"))
    with pytest.raises(WorkerFailed) as failure:
        run.wait(LONG_S)
    assert (run.status, failure.value.rank) == ("failed", None)
    assert str(failure.value).startswith(
        "labkit could not follow the ranks any longer: OSError: [Errno 28] No space left on device"
    )
    assert "The ranks were ended, for nobody follows them any longer" in failure.value.cause
    assert "poll" in failure.value.cause, "with the lines that raised it"
    assert engine.calls[-2:] == ["kill", "close"]
    assert run.recorded.progress(0).last_step == 0


def test_ranks_that_go_on_without_the_notebook_are_left_alone_and_can_be_found_again():
    engine = FakeEngine()
    engine.outlives_notebook, engine.folder = True, SimpleNamespace(path="/runs/5")
    run = going(engine)
    engine.arrived.put(PermissionError("torchrun.out"))
    with pytest.raises(WorkerFailed, match="PermissionError: torchrun.out") as failure:
        run.wait(LONG_S)
    assert "labkit.attach('/runs/5') follows them again" in failure.value.cause
    assert "kill" not in engine.calls


def test_an_error_in_letting_go_of_the_ranks_is_not_hidden_either(monkeypatch):
    engine = FakeEngine(world_size=1)
    monkeypatch.setattr(engine, "close", lambda: [][1])
    run = going(engine)
    engine.arrived.put(events.Stopped(0))
    engine.arrived.put(events.Exit(0, 0))
    with pytest.raises(WorkerFailed, match="could not follow the ranks any longer: IndexError"):
        run.wait(LONG_S)


STACK = 'Current thread 0x01 (most recent call first):\n  File "/tmp/cell.py", line {line} in <module>\n'


def test_ranks_that_went_on_after_they_were_asked_where_they_stand_are_asked_anew():
    """The answer to the first question is of a place that they have left since."""
    engine = FakeEngine()
    run = going(engine, timeout_s=0.3)
    run._follower.state.progress_s = time.monotonic()
    wait_until(lambda: "ask_for_stacks" in engine.calls, LONG_S)
    engine.arrived.put(events.Stack(0, STACK.format(line=1)))
    for rank in range(2):
        engine.arrived.put(logged(rank))
    wait_until(lambda: engine.calls.count("ask_for_stacks") == 2, LONG_S)
    assert run._follower.state.ranks[0].stack_text == ""
    for rank in range(2):
        engine.arrived.put(events.Stack(rank, STACK.format(line=7)))
    with pytest.raises(WorkerFailed) as failure:
        run.wait(LONG_S)
    assert "line 7" in str(failure.value)
    assert "line 1" not in str(failure.value)


def test_ranks_that_take_long_to_answer_have_the_time_that_their_engine_allows():
    engine = FakeEngine()
    engine.stacks_s = 30.0  # over a network's file system
    run = going(engine)
    threading.Timer(0.3, lambda: [engine.arrived.put(events.Stack(r, STACK.format(line=7))) for r in (0, 1)]).start()
    stacks = run.stacks()
    assert [stack.place for stack in stacks] == ["cell.py, line 7"] * 2
    run.stop(0)


def test_what_was_started_is_ended_if_nobody_came_to_follow_it(monkeypatch):
    engine = FakeEngine()
    run = Run(engine, 2, "train")

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(run._follower, "begin", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run.start(JOB)
    assert engine.calls == ["start", "kill", "close"]
    assert run not in going_runs.going


def test_a_stop_that_nobody_answers_is_not_waited_for_without_end(monkeypatch):
    monkeypatch.setattr(monitor_run, "END_S", 0.2)
    engine = FakeEngine(immortal=True)
    run = going(engine)
    engine.arrived.put(events.Notice(-1, "SLURM job 5: squeue does not answer"))
    wait_until(lambda: run.notice, LONG_S)
    with pytest.raises(TimeoutError, match=r"not known to be gone \(SLURM job 5: squeue does not answer\)"):
        run.stop(0)
    assert run.status == "running", "and followed on"
    for rank in range(2):
        engine.arrived.put(events.Exit(rank, -9))
    assert run.stop().status == "stopped"


def train(worker, seed=42):
    """A function with a parameter that `launch` keeps for itself."""


@pytest.mark.parametrize("seed", [0, 1, None])
def test_a_seed_that_the_function_would_not_get_is_refused_whatever_it_is(seed):
    with pytest.raises(
        ValueError, match=r"train has a parameter called 'seed', but launch\(\) keeps seed=… for itself"
    ):
        launcher.launch(train, seed=seed)


def test_a_function_may_have_a_seed_of_its_own_if_none_is_given():
    launcher._check_call(train, (), {}, {"world_size": None, "seed": None})
