"""The timeline as one file in Chrome's trace event format, which Perfetto and chrome://tracing open.

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU. A rank is a process, and a
lane a thread. Slices of one thread must lie within each other or apart, or viewers draw them wrongly: collectives that
go on at the same time get a lane each. Times are microseconds since the first slice began on any rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from labkit.trace.meeting import Meeting
from labkit.trace.records import TRANSFER, WAITING, Call, Place, RankTrace, Span

STEPS, PHASES = "steps", "parts of a step"


def as_json(ranks: Sequence[RankTrace], met: Sequence[Meeting], name: Mapping[Place, str]) -> dict[str, Any]:
    """Return the trace as the file has it."""
    of_ranks = []
    for rank in ranks:
        mine = {id(meeting.calls[rank.rank]): meeting for meeting in met if rank.rank in meeting.calls}
        of_ranks.append((rank, _lanes(rank, mine, name)))
    # Perfetto drops what begins before 0, as a backward pass may in which an optimizer steps, and so ends a step.
    zero_s = min((one[2] for _, lanes in of_ranks for slices in lanes.values() for one in slices), default=0.0)
    events: list[dict[str, Any]] = []
    for rank, lanes in of_ranks:
        events += _names(rank, list(lanes))
        for index, slices in enumerate(lanes.values()):
            found = [_complete(rank.rank, _thread(rank.rank, index), one, zero_s) for one in slices]
            events += [one for one in found if one["dur"]]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"written by": "labkit"}}


Slice = tuple[str, str, float, float, dict[str, Any]]
"""Name, category, start and end in seconds, arguments."""


def _lanes(rank: RankTrace, met: Mapping[int, Meeting], name: Mapping[Place, str]) -> dict[str, list[Slice]]:
    """Return a rank's slices by lane, in the order in which lanes are shown."""
    lanes: dict[str, list[Slice]] = {
        STEPS: [(f"step {number}", "step", *step, {}) for number, step in enumerate(rank.steps, 1)]
    }
    phases: list[Slice] = [(p.part, p.part, p.start_s, p.end_s, _line(p.place, name)) for p in rank.phases]
    lanes |= _apart(PHASES, phases, may_nest=True)
    for lane in sorted({span.lane for span in rank.spans}):
        spans = [s for s in rank.spans if s.lane == lane]
        lanes |= _apart(lane, [(s.name, s.part, s.start_s, s.end_s, _said(s, name)) for s in spans], may_nest=True)
    for lane in sorted({call.lane for call in rank.calls}):
        calls = {id(c): c for c in rank.calls if c.lane == lane}
        found = _apart(lane, [(c.kind, str(key), c.start_s, c.end_s, {}) for key, c in calls.items()], may_nest=False)
        for title, slices in found.items():
            mine = [calls[int(key)] for _, key, *_ in slices]
            lanes[title] = [one for call in mine for one in _halves(call, met.get(id(call)), name)]
    return lanes


def _halves(call: Call, meeting: Meeting | None, name: Mapping[Place, str]) -> list[Slice]:
    """Return a collective, and within it waiting and transfer."""
    found: list[Slice] = [(call.kind, "collective", call.start_s, call.end_s, _said(call, name))]
    if meeting is not None:
        middle_s = min(max(meeting.full_s, call.start_s), call.end_s)
        found.append((WAITING, WAITING, call.start_s, middle_s, {"for rank": meeting.last}))
        found.append((TRANSFER, TRANSFER, middle_s, call.end_s, {}))
    return [one for one in found if one[3] > one[2]]


def _apart(lane: str, slices: Iterable[Slice], may_nest: bool) -> dict[str, list[Slice]]:
    """Return slices over as many lanes as it takes for no two of one lane to overlap, unless one lies in the other."""
    found: list[list[Slice]] = []
    ends: list[list[float]] = []
    for one in sorted(slices, key=lambda each: (each[2], -each[3])):
        for index, stack in enumerate(ends):
            while stack and stack[-1] <= one[2]:
                stack.pop()
            if not stack or (may_nest and one[3] <= stack[-1]):
                stack.append(one[3])
                found[index].append(one)
                break
        else:
            ends.append([one[3]])
            found.append([one])
    return {lane if not index else f"{lane} {index + 1}": each for index, each in enumerate(found)}


def _names(rank: RankTrace, lanes: Sequence[str]) -> list[dict[str, Any]]:
    """Return the metadata that name a process and its threads, and put them in order."""
    pid = rank.rank
    first = _thread(pid, 0)
    said: list[tuple[str, int, dict[str, Any]]] = [
        ("process_name", first, {"name": f"rank {pid} ({rank.machine})"}),
        ("process_sort_index", first, {"sort_index": pid}),
    ]
    for index, lane in enumerate(lanes):
        tid = _thread(pid, index)
        said += [("thread_name", tid, {"name": lane}), ("thread_sort_index", tid, {"sort_index": index})]
    return [{"ph": "M", "name": what, "pid": pid, "tid": tid, "ts": 0, "args": args} for what, tid, args in said]


def _thread(pid: int, index: int) -> int:
    """Return the number of a lane's thread, which no other lane of any rank has.

    Perfetto takes 0 for the number of the process, and a thread with that for its main one.
    """
    return 1000 * pid + 1 + index


def _complete(pid: int, tid: int, one: Slice, zero_s: float) -> dict[str, Any]:
    """Return one slice. Both ends are rounded, not the length: what ends where another begins stays apart from it.

    To eighths of a microsecond, which are exact as floating-point numbers: Perfetto makes whole nanoseconds of them.
    """
    title, category, start_s, end_s, args = one
    start, end = round(8e6 * (start_s - zero_s)), round(8e6 * (end_s - zero_s))
    times = {"ts": start / 8, "dur": (end - start) / 8}
    return {"ph": "X", "name": title, "cat": category, "pid": pid, "tid": tid, **times, "args": args}


def _line(place: Place, name: Mapping[Place, str]) -> dict[str, Any]:
    return {"line": name[place]} if place in name else {}


def _said(one: Span | Call, name: Mapping[Place, str]) -> dict[str, Any]:
    """Return what a viewer shows of an operator, or a collective."""
    said: dict[str, Any] = {}
    if one.shapes:
        said |= {"shapes": str([list(shape) for shape in one.shapes]), "bytes": one.size}
    said |= _line(one.place, name)
    if isinstance(one, Call) and one.key is not None:
        said |= {"group": one.key[0], "number": one.key[1]}
    return said
