"""An observer of labkit's own that fails: it is switched off and named, and the run goes on and ends as it would."""

from __future__ import annotations

import contextlib
import threading
import time
from array import array

import pytest

import labkit
from labkit.launcher import show_run
from labkit.monitor.observers import Observers, RunObserver
from labkit.protocol import events
from labkit.run import Run
from labkit.ui import summary
from tests.conftest import LONG_S, wait_until
from tests.support.fake_engine import FakeEngine, a_job

OVER_S = 5.0

ENDS = {"finishes": "finished", "fails": "failed", "falls silent": "failed", "is stopped": "stopped"}
"""What becomes of the ranks, and of the run."""

METHODS = [name for name, value in vars(RunObserver).items() if callable(value) and not name.startswith("_")]
"""All that every observer is asked …"""


def events_of(rank, end):
    """What comes from a rank."""
    yield events.Started(rank)
    yield events.Log(rank, ("loss",), array("q", [0]), array("d", [0.1]), array("d", [1.0]))
    if end == "fails":
        yield events.Failure(rank, 1.0 + rank, "running", f"ValueError: bad batch {rank}", "its traceback")
        yield events.Exit(rank, 1)
    if end == "finishes":
        yield events.Stopped(rank)
        yield events.Exit(rank, 0)


def run_with(observers, end):
    """Run to the end, as `labkit.launch` does, and return the run."""
    engine = FakeEngine()
    run = Run(engine, 2, "train", stall_s=0.2 if end == "falls silent" else None, observers=observers)
    for rank in range(2):
        for event in events_of(rank, end):
            engine.arrived.put(event)
    began_s = time.monotonic()

    def launch():
        run.start(a_job())
        if end == "is stopped":
            wait_until(lambda: run._state.ranks[1].phase == "running")
            run.ask_to_stop()
        with contextlib.suppress(labkit.WorkerFailed):
            show_run(run, live=False, wait=True)

    thread = threading.Thread(target=launch, daemon=True)
    thread.start()
    thread.join(LONG_S)
    assert run.over.is_set(), f"never ends: {run.states}"
    assert isinstance(run.notice, str)
    run.over_after_s = time.monotonic() - began_s
    return run


def assert_ended(run, end):
    assert run.status == ENDS[end]
    assert run.over_after_s < OVER_S
    assert run.recorded.progress(1).last_step == 0
    if end == "fails":
        assert str(run.error).startswith("rank 0 failed: ValueError: bad batch 0")
    if end == "falls silent":
        assert str(run.error).startswith("no rank logged, printed or returned anything for 0.2 s (stall_s)")


def assert_named(run, observer, said):
    expected = f"labkit's own {observer.title} failed and was switched off; the run goes on without it: {said}"
    assert run.warnings == [expected]
    assert expected in summary.as_text(run)
    assert summary.html.escape(expected) in summary.as_html(run)
    assert expected in run.notice
    if run.error is not None:
        assert expected in str(run.error)


# What may go wrong with each thing that an observer is asked


def raises(error):
    def fault(self, *_, **__):
        raise error

    return fault


def broken(method, fault):
    """An observer of which one method has a fault."""
    return type("Broken", (RunObserver,), {"title": "broken observer", method: fault})()


class Asks(RunObserver):
    """Notes what it is asked."""

    def __init__(self):
        self.asked = set()

    def __getattribute__(self, name):
        if name in METHODS:
            self.asked.add(name)
        return super().__getattribute__(name)


@pytest.fixture(scope="module")
def asked():
    """By how a run ends, what its observers are asked."""
    found = {}
    for end in ENDS:
        observer = Asks()
        run_with([observer], end)
        found[end] = observer.asked
    return found


def test_all_that_an_observer_may_be_asked_is_asked_here(asked):
    assert set.union(*asked.values()) == set(METHODS)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("error", [RuntimeError("injected"), SystemExit("injected")], ids=repr)
def test_whatever_an_observer_raises_the_run_ends_as_it_would(method, error, asked):
    end = next(end for end in ENDS if method in asked[end])
    observer, other = broken(method, raises(error)), Asks()
    run = run_with([observer, other], end)
    assert_ended(run, end)
    assert_named(run, observer, f"{type(error).__name__}: injected")
    assert method in other.asked, "the others are asked all the same"


def test_an_interrupt_of_whoever_waits_is_no_observers_mistake():
    observer = broken("look", raises(KeyboardInterrupt()))
    observers = Observers([observer])
    with pytest.raises(KeyboardInterrupt):
        observers.tell(lambda each: each.look(0.0))
    assert observers == [observer]
