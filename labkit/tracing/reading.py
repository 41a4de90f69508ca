"""The profiler's record, read: operators and kernels as spans, collectives as calls, batches being loaded.

Times of the profiler's raw events are nanoseconds since 1970; here they are seconds since some zero.
"""

from __future__ import annotations

import bisect
import math
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch.autograd import DeviceType

from labkit.tracing.records import MAIN, NOWHERE, Call, Phase, Place, Span

COLLECTIVE = re.compile(r"(?:gloo|nccl):(\w+)")
KERNEL = re.compile(r"nccl(?:Dev)?Kernel_?(\w+?)_")
LOADING = "enumerate(DataLoader)#"
USER_SCOPE = 7
"""Of events that someone wrote about: a DataLoader, an optimizer, DDP. They compute nothing themselves."""

ITEM_BYTES = {
    **dict.fromkeys(("double", "long int", "long", "c10::complex<float>"), 8),
    **dict.fromkeys(("float", "int"), 4),
    **dict.fromkeys(("c10::Half", "c10::BFloat16", "short int", "short"), 2),
    "c10::complex<double>": 16,
}
"""Bytes per number of the profiler's types; of others 1, as for bool and the 8-bit ones."""


class Event(NamedTuple):
    """One of the profiler's events, in seconds."""

    name: str
    start_s: float
    end_s: float
    thread: int = 0
    """The system's number of the thread; on a GPU of the stream."""
    on_device: bool = False
    scope: int = 0
    shapes: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[str, ...] = ()
    link: int = 0
    """Number of an operator, and of the kernels that it launched."""

    @property
    def size(self) -> int:
        """Bytes of the tensors put in."""
        pairs = zip(self.shapes, self.dtypes, strict=False)
        return sum(math.prod(shape) * ITEM_BYTES.get(dtype, 1) for shape, dtype in pairs)


def events_of(profiler: Any, zero_ns: int = 0) -> list[Event]:
    """Return what a `torch.profiler.profile` that has ended recorded, in seconds since a time in ns since 1970."""
    found = []
    for event in profiler.profiler.kineto_results.events():
        start_ns = event.start_ns() - zero_ns
        on_device = event.device_type() != DeviceType.CPU
        inputs = [(tuple(shape), kind) for shape, kind in zip(event.shapes(), event.dtypes(), strict=False) if shape]
        found.append(
            Event(
                event.name(),
                start_ns / 1e9,
                (start_ns + event.duration_ns()) / 1e9,
                event.device_resource_id(),
                on_device,
                event.scope(),
                tuple(shape for shape, _ in inputs),
                tuple(kind for _, kind in inputs),
                event.linked_correlation_id() if on_device else event.correlation_id(),
            )
        )
    return found


def loading(events: Iterable[Event], places: Places) -> list[Phase]:
    """Return when a batch was being loaded: in `next` of a DataLoader's iterator."""
    return [Phase("data", e.start_s, e.end_s, places.at(e.start_s)) for e in events if e.name.startswith(LOADING)]


class Places:
    """Where in the reader's code the main thread was when."""

    def __init__(self, lines: Sequence[tuple[float, Place]]) -> None:
        self._times, self._places = [at for at, _ in lines], [place for _, place in lines]

    def at(self, when_s: float) -> Place:
        """Return the line; `NOWHERE` if that is not known."""
        index = bisect.bisect_right(self._times, when_s) - 1
        return self._places[index] if index >= 0 else NOWHERE

    def longest(self, start_s: float, end_s: float) -> Place:
        """Return the line in which it was for most of this time."""
        first = max(0, bisect.bisect_right(self._times, start_s) - 1)
        last = bisect.bisect_left(self._times, end_s)
        spent: dict[Place, float] = {}
        for index in range(first, last):
            end = self._times[index + 1] if index + 1 < len(self._times) else end_s
            seconds = min(end, end_s) - max(self._times[index], start_s)
            spent[self._places[index]] = spent.get(self._places[index], 0.0) + seconds
        return max(spent, key=lambda place: spent[place], default=NOWHERE)


def spans(events: Sequence[Event], phases: Sequence[Phase], places: Places) -> list[Span]:
    """Return operators and kernels, each with the part of the step that it belongs to.

    What only contains others is left out: annotations, autograd's own bookkeeping, and whatever has a collective in it
    and so may wait. What is within a part of the step is told by when it began; a kernel by when it was launched.
    """
    here = [e for e in events if not e.on_device and not COLLECTIVE.match(e.name)]
    part_of = _Parts(phases)
    threads = {threading.main_thread().native_id: MAIN}
    found, began = [], {}
    for thread in dict.fromkeys(e.thread for e in here):
        lane = threads.setdefault(thread, f"thread {len(threads) + 1}")
        for event, depth in nested([e for e in here if e.thread == thread]):
            began[event.link] = event.start_s
            found.append(_span(event, part_of.at(event.start_s), lane, depth, places.at(event.start_s)))
    for event in events:
        if event.on_device and event.scope != USER_SCOPE and not event.name.startswith("nccl"):
            launched_s = began.get(event.link, event.start_s)
            place = places.at(launched_s)
            found.append(_span(event, part_of.at(launched_s), f"stream {event.thread}", 0, place))
    return found


def _span(event: Event, part: str, lane: str, depth: int, place: Place) -> Span:
    return Span(event.name, part, lane, event.start_s, event.end_s, depth, event.shapes, event.size, place)


def nested(events: Sequence[Event]) -> list[tuple[Event, int]]:
    """Return the events of one thread that compute, each with its depth below others that do."""
    ordered = sorted(events, key=lambda e: (e.start_s, -e.end_s))
    is_wrapper = [e.scope == USER_SCOPE or e.name.startswith("autograd::engine::") or "c10d" in e.name for e in ordered]
    above: list[list[int]] = []
    stack: list[int] = []
    for index, event in enumerate(ordered):
        while stack and ordered[stack[-1]].end_s <= event.start_s:
            stack.pop()
        above.append(list(stack))
        if "c10d" in event.name:
            for one in stack:
                is_wrapper[one] = True
        stack.append(index)
    return [
        (event, sum(not is_wrapper[one] for one in above[index]))
        for index, event in enumerate(ordered)
        if not is_wrapper[index]
    ]


class _Parts:
    """In which part of a step an instant lies: the innermost phase that it is in."""

    def __init__(self, phases: Sequence[Phase]) -> None:
        self._phases = sorted(phases, key=lambda phase: phase.start_s)
        self._starts = [phase.start_s for phase in self._phases]

    def at(self, when_s: float) -> str:
        index = bisect.bisect_right(self._starts, when_s) - 1
        for phase in reversed(self._phases[max(0, index - 8) : index + 1]):
            if when_s < phase.end_s:
                return phase.part
        return "other"


def calls(
    events: Sequence[Event], recorded: Sequence[Mapping[str, Any]], places: Places, zero_ns: int = 0
) -> list[Call]:
    """Return the collectives and messages.

    `recorded` are the calls in PyTorch's flight recorder since the events began, in order: they have the group, the
    number in it, and when the rank called (in ns since 1970), before a thread of gloo's took the work up. Without them
    these are not known, and it counts as called when it was taken up.

    gloo works on the host, where its events last as long as the work. Of NCCL there end when the work has been handed
    over; its kernel spans the work itself.
    """
    hosts = sorted((e for e in events if not e.on_device and COLLECTIVE.match(e.name)), key=lambda e: e.start_s)
    kernels = sorted((e for e in events if e.on_device and KERNEL.match(e.name)), key=lambda e: e.start_s)
    waiting: dict[str, list[Mapping[str, Any]]] = {}
    for each in recorded:
        waiting.setdefault(each["profiling_name"], []).append(each)
    found: list[Call] = []
    of_nccl: list[Call] = []
    for event in hosts:
        kind = _kind(event.name)
        queue = waiting.get(event.name, [])
        entry = queue.pop(0) if queue else None
        key, start_s = None, event.start_s
        if entry is not None and not entry.get("is_p2p"):
            key = (str(entry["process_group"][0]), int(entry["collective_seq_id"]))
        if entry is not None:
            start_s = min(start_s, (entry["time_created_ns"] - zero_ns) / 1e9)
        call = Call(kind, key, start_s, event.end_s, event.shapes, event.size, places.at(start_s))
        (of_nccl if event.name.startswith("nccl") else found).append(call)
    if len(of_nccl) == len(kernels):
        pairs = zip(of_nccl, kernels, strict=True)
        found += [c._replace(start_s=k.start_s, end_s=k.end_s, lane=f"stream {k.thread}") for c, k in pairs]
    else:  # several calls in one kernel, or the other way round
        found += [Call(_of_kernel(k.name), None, k.start_s, k.end_s, lane=f"stream {k.thread}") for k in kernels]
    return sorted(found, key=lambda call: call.start_s)


def _kind(name: str) -> str:
    found = COLLECTIVE.match(name)
    return found[1].strip("_") if found else name


def _of_kernel(name: str) -> str:
    found = KERNEL.match(name)
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", found[1]).lower() if found else name
