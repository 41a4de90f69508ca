"""What goes wrong in other people's notebooks before a first step, or as soon as somebody presses ■ twice.

Each was asked for, or complained of, in a thread that its test names. A `Dataset` class from a cell in a DataLoader's
workers, however these begin (pytorch #138957), is in `test_children.py`; a debugger over ranks (pytorch #115517,
torchtitan #652) in `test_debugging.py`; a library's own processes (Lightning #6106) in `test_descendants.py`; two
interrupts of a real kernel (Monarch #862) in `test_kernel.py`.
"""

from __future__ import annotations

import signal
import threading
import time

import pytest

import labkit
from labkit import run as monitor_run
from labkit.debugger import Debugger
from labkit.launchers import job_events
from labkit.monitor import asking as question
from labkit.monitor import record
from labkit.protocol import events
from labkit.run import Run
from tests.conftest import LONG_S, wait_until
from tests.monitor.test_follower import STACK, logged
from tests.support.fake_engine import A_JOB, FakeEngine, a_job

# Interrupts


@pytest.mark.parametrize("at", ["ask_where_interrupted", "ask_to_stop", "_pause"])
def test_an_interrupt_at_any_step_of_a_stop_ends_the_run(at, monkeypatch):
    run = begun(FakeEngine(), events.Started(0), events.Started(1))
    left, call = [KeyboardInterrupt], getattr(run, at)
    monkeypatch.setattr(run, at, lambda *given: _raise(left.pop()) if left else call(*given))
    run.stop_interrupted()
    assert (run.over.is_set(), run.status, run.interrupts) == (True, "stopped", 2)


def _raise(error):
    raise error


def interrupt_main():
    """Interrupt the main thread as a keyboard does: also out of a lock that it waits for."""
    time.sleep(0.1)  # one that comes just before it blocks waits until it no longer does
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)


class Held:
    """An observer that never returns from one of its methods, until the test is over."""

    def __init__(self, method):
        self.is_over, self.is_in = threading.Event(), threading.Event()
        self.observer = Debugger(wait=True)
        setattr(self.observer, method, self._hold)

    def _hold(self, *_):
        self.is_in.set()
        self.is_over.wait(LONG_S)


@pytest.mark.parametrize("method", ["take", "attend"])
def test_the_second_interrupt_frees_the_cell_whatever_keeps_the_run_from_ending(method, monkeypatch):
    """An observer that never returns: with the run's lock held, or in the very thread that waits."""
    monkeypatch.setattr(monitor_run, "INTERRUPTED_S", 0.5)
    monkeypatch.setattr(record, "LOCK_S", 0.1)
    held = Held(method)
    run = Run(FakeEngine(immortal=True), 2, "train", observers=[held.observer])
    run.start(a_job())
    run.engine.arrived.put(events.Ready())
    is_waiting = threading.Event()
    attend = run.attend
    monkeypatch.setattr(run, "attend", lambda: (is_waiting.set(), attend()))

    def interrupt_twice():
        held.is_in.wait(LONG_S)
        is_waiting.wait(LONG_S)
        interrupt_main()
        wait_until(lambda: run.stopping)
        interrupt_main()

    interrupting = threading.Thread(target=interrupt_twice)
    interrupting.start()
    began_s = time.monotonic()
    with pytest.raises(labkit.RunInterrupted, match="told to stop, but has not been seen to stop"):
        run.wait()
    assert time.monotonic() - began_s < LONG_S / 4
    interrupting.join()
    assert "kill" in run.engine.calls
    held.is_over.set()
    run.engine.immortal = False
    run.stop(0)


@pytest.mark.parametrize("times", [1, 3])
def test_interrupts_while_ranks_are_started_leave_none_of_them_going(times, monkeypatch):
    engine, left = FakeEngine(), [KeyboardInterrupt] * times

    def interrupted(*_):
        if left:
            raise left.pop()
        engine.closed = True

    monkeypatch.setattr(engine, "start", interrupted)
    monkeypatch.setattr(engine, "close", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Run(engine, 2, "train").start(A_JOB)
    assert engine.closed


# A failure that others wait for


@pytest.mark.parametrize("grace_s", [LONG_S, float("inf")], ids=["ended here", "ended elsewhere"])
def test_ranks_that_go_on_after_a_failure_are_asked_once_where_they_stand(grace_s, monkeypatch):
    monkeypatch.setattr(question, "FAILED_S", 0.02)
    engine = FakeEngine()
    engine.failure_grace_s = grace_s
    failures = [events.Failure(0, 1.0, "running", "ValueError: bad batch", "trace")]
    run = begun(engine, events.Started(0), events.Started(1), *failures)
    wait_until(lambda: run.states == ["failed", "running"])
    time.sleep(0.4)
    assert engine.calls.count("ask_for_stacks") == 1
    if grace_s == float("inf"):  # as of a job that is put back into the queue
        for event in (job_events.Restarted(-1, 1), events.Started(0), events.Started(1)):
            engine.arrived.put(event)
        wait_until(lambda: run.states == ["running", "running"])
        engine.arrived.put(failures[0])
        wait_until(lambda: engine.calls.count("ask_for_stacks") == 2)
    run.stop(0)


# A first step that never comes


def begun(engine, *came):
    """A run of which something has come."""
    run = Run(engine, 2, "train")
    for event in came:
        engine.arrived.put(event)
    run.start(a_job())
    return run


def test_ranks_that_log_nothing_for_long_are_asked_once_where_they_stand(monkeypatch):
    """ultralytics #3904: a reader waited 40 minutes for a first step, with nothing to see."""
    assert question.FIRST_STEP_S == 60
    monkeypatch.setattr(question, "FIRST_STEP_S", 0.3)
    engine = FakeEngine()
    run = begun(engine, events.Started(0), events.Started(1))
    wait_until(lambda: "ask_for_stacks" in engine.calls)
    for rank in range(2):
        engine.arrived.put(events.Stack(rank, STACK.format(line=7)))
    wait_until(lambda: run.notice)
    said = "no rank has logged or printed anything in 0.3 s:\nranks 0 and 1 are at cell.py, line 7"
    assert run.notice.startswith(said)
    engine.arrived.put(logged(0))
    wait_until(lambda: not run.notice)
    time.sleep(0.5)
    assert engine.calls.count("ask_for_stacks") == 1
    run.stop(0)


def test_ranks_that_have_not_all_begun_or_have_logged_are_not_asked(monkeypatch):
    monkeypatch.setattr(question, "FIRST_STEP_S", 0.1)
    for came in ([events.Started(0)], [events.Started(0), events.Started(1), logged(1)]):
        engine = FakeEngine()
        run = begun(engine, *came)
        time.sleep(0.4)
        assert (engine.calls, run.notice) == (["start"], "")
        run.stop(0)
