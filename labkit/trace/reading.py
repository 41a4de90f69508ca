"""What the profiler's events say: operators and kernels as spans, collectives as calls, batches being loaded."""

from __future__ import annotations

import bisect
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from labkit.trace.profiling import COLLECTIVE, KERNEL, Event
from labkit.trace.records import MAIN, NOWHERE, Call, Phase, Place, Span

LOADING = "enumerate(DataLoader)#"
USER_SCOPE = 7
"""Of events that someone wrote about: a DataLoader, an optimizer, DDP. They compute nothing themselves."""


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
