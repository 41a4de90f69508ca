"""Threads that take a run's curves to its trackers, and what is said of one that does not take them.

Guarantees: no tracker can hold up the ranks, the run, its view or another tracker; the cell that launched the run waits
at most `CLOSE_S` longer; a tracker that fails is named when it does, and what it lacks is said once, at the end.

There is no queue to overflow: everything that was logged is kept in the run's history, and each thread has a place in
it.
"""

from __future__ import annotations

import atexit
import contextlib
import inspect
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from labkit.monitor.record import RunRecord
from labkit.trackers.base import Tracker, plain
from labkit.trackers.curves import Curves, Row
from labkit.trackers.named import trackers
from labkit.trackers.since import Place, since

CLOSE_S = 30.0
"""How long trackers may take after the run's end. MLflow's first database alone takes half of that to be made."""

POLL_S = 0.2
"""Time between two looks at the history."""

FLUSH_ROWS = 500
"""Log calls before a tracker writes what it has gathered."""

FAILURES = 3
"""Failures in a row after which a tracker is asked no more."""


def writers(
    log_to: Any, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], world_size: int
) -> Callable[[RunRecord], contextlib.AbstractContextManager[object]]:
    """Return what gives, for the run of this call, the context in which its trackers are written to and waited for.

    Raises as `labkit.launch` says for what `log_to` cannot be, before any rank starts.
    """
    if log_to is None:
        return contextlib.nullcontext
    parameters = dict(kwargs)
    with contextlib.suppress(ValueError):  # some built-in functions do not say what they take
        bound = inspect.signature(function).bind(None, *args, **kwargs)
        kinds = inspect.signature(function).parameters
        named = list(bound.arguments.items())[1:]
        parameters |= {n: value for n, value in named if kinds[n].kind is not inspect.Parameter.VAR_KEYWORD}
    parameters["world_size"] = world_size
    made, shown = trackers(log_to), plain(parameters)
    return lambda run: Following(run, made, shown)


def follow(run: RunRecord, log_to: Any, parameters: Mapping[str, Any] | None = None) -> None:
    """Have trackers get what a run has logged, from its beginning, and what it logs from now on.

    For a run that `labkit.attach` has found; `labkit.launch(…, log_to=…)` does the same. Returns at once, or when all
    is written if the run is over. Raises as `launch` does for `log_to`.
    """
    with Following(run, trackers(log_to), plain({"world_size": run.world_size, **(parameters or {})})):
        pass


class Following(threading.Thread):
    """Minds the trackers of one run, for as long as it goes on and `CLOSE_S` after."""

    def __init__(self, run: RunRecord, trackers: list[Tracker], parameters: Mapping[str, Any]) -> None:
        super().__init__(name="labkit-trackers", daemon=True)
        self._run = run
        self._writers = [_Writer(run, tracker, parameters) for tracker in trackers]

    def __enter__(self) -> Following:
        for writer in self._writers:
            writer.start()
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._run.over.is_set():
            with contextlib.suppress(KeyboardInterrupt):  # who interrupts this wants the cell back, and the run
                self.join()

    def run(self) -> None:
        """Wait for the run's end and for that of its trackers; say what they lack."""
        self._run.over.wait()
        deadline = time.monotonic() + CLOSE_S
        for writer in self._writers:
            writer.join(max(0.0, deadline - time.monotonic()))
        for writer in self._writers:
            writer.leave()


class _Writer(threading.Thread):
    """Takes one run's curves to one tracker."""

    def __init__(self, run: RunRecord, tracker: Tracker, parameters: Mapping[str, Any]) -> None:
        super().__init__(name=f"labkit-tracker-{type(tracker).__name__}", daemon=True)
        self._run, self._tracker, self._parameters = run, tracker, parameters
        self._curves = Curves(run.world_size, bool(getattr(tracker, "by_rank", False)))
        self._takes_time = _takes_time(tracker.log)
        self._ending = threading.Event()
        self._left = False
        self._failures = 0
        """In a row."""
        self._lost = 0
        """Log calls that it has not taken …"""
        self._unsure = 0
        """… and those since it has last written what it gathered."""
        self._last_step: int | None = None
        self._failed = self._began = self._has_said_again = False

    def run(self) -> None:
        """Write until the run is over and everything is written, or nobody waits any longer."""
        self._began = self._try("could not begin", "begin", self._run.name, dict(self._parameters))
        if not self._began:
            self._failures = FAILURES
        atexit.register(self._end)  # after the library's own, so that it comes before it
        try:
            self._write_all()
            if self._began:
                self._try("could not end", "end", self._run.status)
            self._try("could not be closed", "close")
        finally:
            atexit.unregister(self._end)

    def _write_all(self) -> None:
        place = Place()
        while True:
            is_last = self._run.over.is_set() or self._ending.is_set()
            before = place
            new, place = since(self._run.recorded, before)
            if place.sifted != before.sifted:  # ranks went back to a checkpoint
                self._curves.begin_again()
            for log in new:
                self._curves.take(log)
            if self._curves.began_again and not self._has_said_again:
                self._has_said_again = True
                rank, step, name = self._curves.began_again
                self._say(
                    f"has curves called {name!r} and so on: rank {rank} began its steps again at step {step}, as a "
                    "second fit or fold does. Log under other names for other ones, or steps that go on for one"
                )
            self._write(self._curves.ready(range(self._run.world_size) if is_last else self._ended()))
            if is_last or self._left:
                return
            self._run.over.wait(POLL_S)

    def _ended(self) -> list[int]:
        return [rank for rank, state in enumerate(self._run.states) if state not in ("queued", "starting", "running")]

    def _write(self, rows: list[Row]) -> None:
        for number, (step, values, time_s) in enumerate(rows, start=1):
            if self._left or self._failures >= FAILURES:
                self._lost += len(rows) - number + 1
                return
            at_s = [self._run.start_s + time_s] if self._takes_time else []
            if self._try(f"failed at step {step}", "log", step, values, *at_s):
                self._last_step, self._unsure = step, self._unsure + 1
            else:
                self._lost += 1
            if number % FLUSH_ROWS == 0 or number == len(rows):
                if not self._try(f"failed after step {step}", "flush"):
                    self._lost += self._unsure
                self._unsure = 0

    def _try(self, what: str, method: str, *arguments: Any) -> bool:
        """Call a method of the tracker, if it has it; return whether it has not failed. The first failure is said."""
        call = getattr(self._tracker, method, None)
        if call is None:
            return True
        try:
            call(*arguments)
        except (Exception, SystemExit) as error:
            self._failures += 1
            if not self._failed:
                self._failed = True
                self._say(f"{what}: {type(error).__name__}: {error}".rstrip(" :") + ". The run is not affected")
            return False
        if method == "log":
            self._failures = 0
        return True

    def leave(self) -> None:
        """Say what the tracker lacks, if anything, and wait for it no longer."""
        if self.is_alive() and not self._left:
            self._left = True
            there = "no step" if self._last_step is None else f"nothing after step {self._last_step}"
            self._say(f"was not done {CLOSE_S:g} s after the run's end, and is left alone: it may have {there}")
        elif self._began and self._lost:
            self._say(f"lacks {self._lost} log call{'s' if self._lost > 1 else ''} of the run, which run.history has")
        if self._curves.again:
            self._say(f"was not given {self._curves.again} values, of steps that were not later than one it had")

    def _end(self) -> None:
        """The process is ending: write what there is."""
        self._ending.set()
        self.join(CLOSE_S)

    def _say(self, what: str) -> None:
        print(f"{self._run.name}: {self._tracker!r:.80} {what}", file=sys.stderr, flush=True)


def _takes_time(log: Any) -> bool:
    """Whether a tracker's `log` takes when a step was logged, as a third argument."""
    try:
        return "time_s" in inspect.signature(log).parameters
    except (TypeError, ValueError):
        return False
