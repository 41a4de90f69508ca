"""Record some steps of a plain training function. Runs on the rank; the function is left as it is.

A trace costs its own steps only. Two steps pass before the profiler starts, in which DDP arranges its buckets and
allocators fill, and one after that, for ranks do not start it at the same time and so enter that step apart; in that
one memory is counted. What has been watched is let go of after the last step.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from labkit.protocol import events
from labkit.protocol.pickling import Message, pack_call
from labkit.rank import failure, notebook_main, recorder
from labkit.rank.worker import Worker
from labkit.trace import clocks, profiling, reading
from labkit.trace.lines import LineClock
from labkit.trace.memory import MemoryWatch
from labkit.trace.phases import Phases
from labkit.trace.records import Phase, RankTrace, Span, pack

failure.OWN_FILES.add(__file__)

KIND = "trace"
"""What the notebook knows the record by."""

BEFORE = 2
"""Steps before the profiler starts; the one after them is not kept."""

SPANS, ALL_SPANS = 20_000, 200_000
"""Kept at most: of a rank, and of all ranks together; the longest."""

READERS_PROFILER = (
    "rank {rank} recorded nothing: the function has a profiler of its own on (torch.profiler), and a process has one "
    "at a time. Launch without trace=, or without that"
)

NO_STEPS = (
    "rank {rank} took {count} steps, of which the first {before} are not traced; a step ends where the first optimizer "
    "that steps has stepped or, without one, where the function logs"
)


def check_steps(steps: int) -> None:
    """Raise ValueError for what is no number of steps."""
    if type(steps) is not int or steps < 1:
        raise ValueError(f"trace is a number of steps, at least 1, or None; got {steps!r:.60}")


def traced(call: Message, steps: int) -> Message:
    """Return a call that does what a packed call does, and records so many steps."""
    return pack_call(record, (call, steps), {})


def record(worker: Worker, call: Message, steps: int) -> Any:
    """Make a call that `pack_call` has packed, return what it returns, and send a record of `steps` of its steps."""
    function, args, kwargs = notebook_main.unpack(call, worker.device)
    with Recorder(worker, steps).watching():
        return function(worker, *args, **kwargs)


class Recorder:
    """Watches steps go by, and records those that are asked for."""

    def __init__(self, worker: Worker, steps: int) -> None:
        self._worker, self._wanted = worker, steps
        self._phases = Phases(self._begin, self._mark, self._step_ended)
        self._has_optimizer = False
        self._count = 0
        self._zero_ns = time.time_ns()
        self._began_s = 0.0
        self._marks: list[Phase] = []
        self._steps: list[tuple[float, float]] = []
        self._profiler: Any = None
        self._recorded_from_ns = 0
        self._lines = LineClock()
        self._memory: MemoryWatch | None = None
        self._undo = contextlib.ExitStack()
        """What ends the watch for the reader's own profiler."""
        self._has_given_way = False
        """Whether that is on, or came on."""
        self._is_over = False
        self._clock = clocks.Offset("", 0.0, 0.0)

    @contextlib.contextmanager
    def watching(self) -> Any:
        """Watch what the function does inside; send the record when its last step has ended, or the function."""
        self._clock = clocks.compare(self._worker)
        get_warm(self._worker.device)
        self._worker.log = self._log  # type: ignore[method-assign]
        try:
            with self._phases.watching():
                yield
        finally:
            self._finish()

    def _log(self, *args: Any, **kwargs: Any) -> None:
        try:
            Worker.log(self._worker, *args, **kwargs)
        finally:
            if not self._has_optimizer and not self._is_over:
                self._step_ended()

    def _now(self) -> float:
        return (time.time_ns() - self._zero_ns) / 1e9

    def _begin(self) -> float:
        self._look()
        return self._now()

    def _mark(self, part: str, began_s: float) -> None:
        if self._profiler is not None:
            self._marks.append(Phase(part, began_s, self._now()))
        self._look()

    def _look(self) -> None:
        if self._memory is not None and self._count == BEFORE:
            self._memory.look()

    def _step_ended(self, optimizer: Any = None) -> None:
        self._has_optimizer = self._has_optimizer or optimizer is not None
        self._count += 1
        if self._count > BEFORE + 1:
            self._steps.append((self._began_s, self._now()))
        if self._count == BEFORE:
            self._start(optimizer)
        elif self._count == BEFORE + 1 and self._memory is not None:
            self._memory.stop()
        elif self._count == BEFORE + 1 + self._wanted:
            self._finish()
        self._began_s = self._now()

    def _start(self, optimizer: Any) -> None:
        if optimizer is not None:
            self._memory = MemoryWatch(optimizer, self._worker.device, self._now)
            self._memory.start()
        if torch.autograd._profiler_enabled():
            self._has_given_way = True
            return
        self._recorded_from_ns = time.time_ns()
        self._profiler = profiling.profiler(self._worker.device)
        self._profiler.__enter__()
        self._undo.enter_context(_before_another_profiler(self._give_way))
        self._lines.__enter__()

    def _give_way(self) -> None:
        self._has_given_way = True
        self._finish()

    def _finish(self) -> None:
        """Let go of all that watches, and send the record. Does nothing when it has been done."""
        if self._is_over:
            return
        self._is_over = True
        self._phases.end()
        vars(self._worker).pop("log", None)
        if self._memory is not None and self._count == BEFORE:
            self._memory.stop()
        self._undo.close()
        trace = RankTrace(self._worker.rank, self._clock.machine)
        if self._profiler is not None:
            self._lines.__exit__()
            _synchronize(self._worker.device)
            self._profiler.__exit__(None, None, None)
        if self._has_given_way:
            trace = trace._replace(unknown=READERS_PROFILER.format(rank=self._worker.rank))
        elif self._steps:
            try:
                trace = self._trace()
            except Exception as error:  # what watches a run is not to end it
                said = f"what rank {self._worker.rank} recorded could not be read ({type(error).__name__}: {error})"
                trace = trace._replace(unknown=said)
        else:
            said = NO_STEPS.format(rank=self._worker.rank, count=self._count, before=BEFORE + 1)
            trace = trace._replace(unknown=said)
        self._worker._channel.send(events.Attached(self._worker.rank, KIND, pack(trace)))

    def _trace(self) -> RankTrace:
        found = profiling.events_of(self._profiler, self._zero_ns)
        lines = self._lines.lines(self._zero_ns)
        places = reading.Places(lines)
        phases = [p._replace(place=places.at(p.start_s)) for p in self._marks] + reading.loading(found, places)
        start_s, end_s = self._steps[0][0], self._steps[-1][1]
        called = [
            call._replace(end_s=min(call.end_s, self._next_optimizer_s(call.start_s)))
            for call in reading.calls(found, flight_record(self._recorded_from_ns), places, self._zero_ns)
        ]
        kept, left_out = longest(
            [s for s in reading.spans(found, phases, places) if start_s <= s.start_s < end_s], self._room()
        )
        world = recorder.look(self._worker.rank)
        return RankTrace(
            self._worker.rank,
            self._clock.machine,
            self._zero_ns,
            tuple(self._steps),
            tuple(p for p in phases if p.end_s > start_s and p.start_s < end_s),
            tuple(kept),
            tuple(call for call in called if start_s <= call.start_s < end_s),
            _within(lines, start_s, end_s),
            tuple((name, ranks) for name, _, ranks in world.groups),
            left_out,
            self._clock.offset_s,
            self._clock.uncertain_s,
            tuple(self._memory.held) if self._memory is not None else (),
        )

    def _room(self) -> int:
        return min(SPANS, max(1000, ALL_SPANS // self._worker.world_size))

    def _next_optimizer_s(self, start_s: float) -> float:
        """Return when the rank stepped next after it had called something: then that had ended for it.

        gloo lets whoever waits go on before its own thread ends the record, which would reach into the next step.
        """
        steps_s = (p.start_s for p in self._marks if p.part == "optimizer" and p.start_s > start_s)
        return min(steps_s, default=float("inf"))


def flight_record(from_ns: int) -> list[dict[str, Any]]:
    """Return what PyTorch's flight recorder has of the calls since then, in order; [] where it records none."""
    if not (dist.is_available() and dist.is_initialized()):
        return []
    found = []
    for backend in recorder.RECORDED:
        try:
            entries = recorder.recorded(backend)
        except (AttributeError, TypeError, RuntimeError, ValueError):
            continue  # this PyTorch records none of this backend: calls are matched by their order then
        found += [entry for entry in entries if entry.get("time_created_ns", 0) >= from_ns]
    return sorted(found, key=lambda entry: int(entry["time_created_ns"]))


def longest(spans: list[Span], room: int) -> tuple[list[Span], int]:
    """Return the spans for which there is room, and how many are left out: nested ones first, then the shortest."""
    if len(spans) <= room:
        return spans, 0
    kept = sorted(spans, key=lambda s: (s.depth > 0, s.start_s - s.end_s))[:room]
    return sorted(kept, key=lambda s: s.start_s), len(spans) - room


def _within(lines: Any, start_s: float, end_s: float) -> Any:
    """Return the lines of a stretch of time, the one in which it began included."""
    before = [each for each in lines if each[0] <= start_s][-1:]
    return tuple(before) + tuple(each for each in lines if start_s < each[0] < end_s)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextlib.contextmanager
def _before_another_profiler(give_way: Callable[[], None]) -> Iterator[None]:
    """Call `give_way` before another profiler starts, which would fail where one is on."""
    kind = torch.autograd.profiler.profile
    start = kind._prepare_trace

    def prepare_trace(profiler: Any) -> None:
        give_way()
        start(profiler)

    kind._prepare_trace = prepare_trace  # type: ignore[method-assign]
    try:
        yield
    finally:
        kind._prepare_trace = start  # type: ignore[method-assign]


def get_warm(device: torch.device) -> None:
    """Start a profiler and stop it: the first start takes time, which is not to fall into the function's."""
    if not torch.autograd._profiler_enabled():
        with profiling.profiler(device):
            pass
