"""An observer of labkit's own that fails: it is switched off and named, and the run goes on and ends as it would."""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import pkgutil
import threading
import time
from array import array
from pathlib import Path

import pytest

import labkit
import labkit.debugger
import labkit.plugins
import labkit.trace
import labkit.trackers
from labkit.debugger.debugger import Debugger
from labkit.launcher import show_run
from labkit.monitor.companion import Asked, Companion, companions
from labkit.monitor.observers import Observers
from labkit.monitor.run import Run
from labkit.plugins.report import summary
from labkit.protocol import events
from labkit.ui.kernel import Execution
from tests.conftest import LONG_S, wait_until
from tests.fake_engine import A_JOB, FakeEngine

OVER_S = 5.0

ENDS = {"finishes": "finished", "fails": "failed", "falls silent": "failed", "is stopped": "stopped"}
"""What becomes of the ranks, and of the run."""

METHODS = [name for name, value in vars(Companion).items() if callable(value) or isinstance(value, property)]
METHODS = [name for name in METHODS if not name.startswith("_")] + ["holds_the_time", "notice", "panel"]
"""All that an observer is asked."""


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
    run = Run(engine, 2, "train", timeout_s=0.2 if end == "falls silent" else None, beside=observers)
    for rank in range(2):
        for event in events_of(rank, end):
            engine.arrived.put(event)
    began_s = time.monotonic()

    def launch():
        run.start(A_JOB._replace(start_s=time.time()))
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
    assert run.companions.panel is None
    return run


def assert_ended(run, end):
    assert run.status == ENDS[end]
    assert run.over_after_s < OVER_S
    assert run.recorded.progress(1).last_step == 0
    if end == "fails":
        assert str(run.error).startswith("rank 0 failed: ValueError: bad batch 0")
    if end == "falls silent":
        assert str(run.error).startswith("no rank logged, printed or returned anything for 0.2 s (timeout_s)")


def assert_named(run, observer, said):
    expected = f"labkit's own {observer.title} failed and was switched off; the run goes on without it: {said}"
    assert run.warnings == [expected]
    assert expected in summary.as_text(run)
    assert summary.html.escape(expected) in summary.as_html(run)
    assert expected in run.notice
    if run.error is not None:
        assert expected in str(run.error)
    assert observer not in run.companions


# What may go wrong with each thing that an observer is asked


def raises(error):
    def fault(self, *_, **__):
        raise error

    return fault


class Junk:
    """What no method of an observer returns."""


def broken(method, fault):
    """An observer of which one method has a fault."""
    is_property = isinstance(vars(Companion)[method], property) or not callable(vars(Companion)[method])
    return type(
        "Broken", (Companion,), {"title": "broken observer", method: property(fault) if is_property else fault}
    )()


class Asks(Companion):
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


def end_with(method, asked):
    """How a run ends in which that is asked; `attend` is not where the run is over before anybody waits for it."""
    return "falls silent" if method == "attend" else next(end for end in ENDS if method in asked[end])


def test_all_that_an_observer_may_be_asked_is_asked_here(asked):
    assert set.union(*asked.values()) == set(METHODS)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("error", [RuntimeError("injected"), SystemExit("injected"), MemoryError("injected")], ids=repr)
def test_whatever_an_observer_raises_the_run_ends_as_it_would(method, error, asked):
    end = end_with(method, asked)
    observer, other = broken(method, raises(error)), Asks()
    run = run_with([observer, other], end)
    assert_ended(run, end)
    assert_named(run, observer, f"{type(error).__name__}: injected")
    assert method in other.asked, "the others are asked all the same"


RETURNS_NOTHING = {"take", "look", "add_facts", "attend", "panel"}
"""What an observer may return there is not looked at."""


@pytest.mark.parametrize(
    "method", sorted(set(METHODS) - RETURNS_NOTHING - {"holds_the_time", "asks_why", "mind_the_stop"})
)
def test_an_observer_that_returns_what_it_should_not_is_switched_off(method, asked):
    end = end_with(method, asked)
    observer = broken(method, lambda *_: Junk())
    run = run_with([observer], end)
    assert_ended(run, end)
    assert len(run.warnings) == 1
    assert "labkit's own broken observer failed" in run.warnings[0]


@pytest.mark.parametrize("method", METHODS)
def test_an_observer_that_takes_its_time_does_not_keep_a_run_from_ending(method, asked):
    end = end_with(method, asked)
    given = getattr(Companion, method)

    def slow(self, *arguments):
        if not vars(self).get("has_slept"):
            self.has_slept = True
            time.sleep(0.3)
        return given(self, *arguments) if callable(given) else getattr(given, "fget", lambda _: given)(self)

    run = run_with([broken(method, slow)], end)
    assert_ended(run, end)
    assert run.warnings == []


@pytest.mark.parametrize("part", ["__enter__", "__exit__"])
def test_what_the_context_in_which_a_run_is_shown_raises_is_its_observers(part):
    context = type("Context", (), {"__enter__": lambda self: None, "__exit__": lambda *_: None})
    setattr(context, part, raises(RuntimeError("injected")))
    observer = broken("showing", lambda self: context())
    run = run_with([observer], "finishes")
    assert_ended(run, "finishes")
    assert_named(run, observer, "RuntimeError: injected")


def test_an_observer_may_keep_a_run_from_starting():
    engine = FakeEngine()
    run = Run(engine, 2, "train", beside=[broken("begin", raises(TimeoutError("an earlier run goes on")))])
    with pytest.raises(TimeoutError, match="an earlier run goes on"):
        run.start(A_JOB)
    assert engine.calls == []


def test_an_interrupt_of_whoever_waits_is_no_observers_mistake():
    observers = Observers([broken("attend", raises(KeyboardInterrupt()))])
    with pytest.raises(KeyboardInterrupt):
        observers.attend()
    assert len(observers) == 1
    assert observers.failed == []


def test_an_observer_that_fails_in_two_threads_is_named_once():
    both = threading.Barrier(2)

    def fault(self, *_):
        both.wait(LONG_S)
        raise RuntimeError("injected")

    observers = Observers([broken("look", fault)])
    threads = [threading.Thread(target=observers.look, args=(0.0,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
    assert len(observers.failed) == 1


# Those that there are


def all_of(kind):
    for each in kind.__subclasses__():
        yield each
        yield from all_of(each)


WITHOUT_COMPANIONS = ("as_script", "trackers.accelerate", "trackers.lightning", "trackers.transformers")
for room in (labkit.plugins, labkit.debugger, labkit.trace, labkit.trackers):
    for found in pkgutil.walk_packages(room.__path__, f"{room.__name__}."):
        if not any(part in found.name for part in WITHOUT_COMPANIONS):
            importlib.import_module(found.name)

OWN = sorted(
    {each for each in all_of(Companion) if each.__module__.startswith("labkit.")}, key=lambda each: each.__name__
)


def test_every_observer_says_what_it_is():
    made = {each for each in OWN if not all_of_has_subclasses(each)}
    titles = [each.title for each in made]
    assert Companion.title not in titles
    assert len(set(titles)) == len(titles)


def all_of_has_subclasses(kind):
    return any(each.__module__.startswith("labkit.") for each in kind.__subclasses__())


class Tracker:
    def log(self, step, values):
        pass

    def close(self):
        pass


def observers_of_a_run(kind, monkeypatch):
    """All that are beside a run that was launched with everything, and the one of a class."""
    monkeypatch.setattr("labkit.ui.kernel.this_execution", lambda: Execution("cell", 1))
    monkeypatch.setattr("labkit.trace.recorded.traced", lambda function, steps: function)
    asked = Asked(lambda worker: None, world_size=2, log_to=Tracker(), trace=3, watch="nan", live=False)
    found = companions(asked)
    debugger = Debugger(Run(FakeEngine(), 2, "train", beside=[]), {}, "")
    found.append(debugger)
    return found, next(each for each in found if type(each) is kind)


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        (kind, method)
        for kind in OWN
        if not all_of_has_subclasses(kind)
        for method in METHODS
        if method in {name for base in kind.__mro__ if base not in (Companion, object) for name in vars(base)}
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_whichever_of_labkits_own_fails_the_run_ends_as_it_would(kind, method, asked, monkeypatch):
    end = end_with(method, asked)
    found, observer = observers_of_a_run(kind, monkeypatch)
    fault = raises(RuntimeError("injected"))
    is_property = not callable(getattr(Companion, method))
    faulty = type(kind.__name__, (kind,), {method: property(fault, lambda *_: None) if is_property else fault})
    observer.__class__ = faulty
    run = run_with(found, end)
    assert_ended(run, end)
    assert_named(run, observer, "RuntimeError: injected")


def test_ranks_can_no_longer_be_asked_where_they_stand_once_what_asks_them_has_failed(monkeypatch):
    engine = FakeEngine()
    run = Run(engine, 2, "train")
    monkeypatch.setattr("labkit.plugins.stacks.question.Asking.take", raises(RuntimeError("injected")))
    engine.arrived.put(events.Started(0))
    run.start(A_JOB._replace(start_s=time.time()))
    wait_until(lambda: run.warnings)
    with pytest.raises(
        RuntimeError, match="the ranks cannot be asked where they stand: labkit's own observer of stacks"
    ):
        run.stacks()
    run.stop(0)


# The one place that calls them


def test_observers_are_called_in_one_place_alone():
    """So that each call is one that may fail: elsewhere a run's observers are asked by the methods of `Observers`."""
    allowed = {name for name in vars(Observers) if not name.startswith("_")} | {"append", "failed"}
    for path in Path(labkit.__file__).parent.rglob("*.py"):
        tree = ast.parse(path.read_text())
        inner = {node.value: node for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Attribute)
                and node.attr in ("companions", "_observers")
                and isinstance(node.ctx, ast.Load)
            ):
                asked = inner.get(node)
                passed_on = path.name == "run.py" and ast.unparse(node) == "self.companions" and asked is None
                assert passed_on or (asked is not None and asked.attr in allowed), f"{path}:{node.lineno}"


def test_what_an_observer_may_be_asked_is_what_the_one_place_asks():
    missing = set(METHODS) - set(vars(Observers))
    assert missing == set()
    assert set(inspect.signature(Observers.take).parameters) == set(inspect.signature(Companion.take).parameters)
