"""The timeline as one file in Chrome's trace event format, which Perfetto and chrome://tracing open.

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU. A rank is a process, and a
lane a thread. Slices of one thread must lie within each other or apart, or viewers draw them wrongly: collectives that
go on at the same time get a lane each. Times are microseconds since the first traced step began on any rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from labkit.tracing.meeting import Meeting
from labkit.tracing.records import TRANSFER, WAITING, Call, Place, RankTrace, Span

STEPS, PHASES = "steps", "parts of a step"


def as_json(ranks: Sequence[RankTrace], met: Sequence[Meeting], name: Mapping[Place, str]) -> dict[str, Any]:
    """Return the trace as the file has it."""
    zero_s = min((step[0] for rank in ranks for step in rank.steps), default=0.0)
    full_s = {(rank, id(call)): m.full_s for m in met for rank, call in m.calls.items()}
    last = {id(call): m.last for m in met for call in m.calls.values()}
    events: list[dict[str, Any]] = []
    for rank in ranks:
        lanes = _lanes(rank)
        events += _names(rank, list(lanes))
        for tid, slices in enumerate(lanes.values()):
            for title, category, start_s, end_s, args in slices:
                events.append(_complete(rank.rank, tid, title, category, start_s - zero_s, end_s - start_s, args))
                if category != "collective":
                    continue
                call = args.pop("call")
                args |= _said(call, name)
                middle_s = min(max(full_s.get((rank.rank, id(call)), start_s), start_s), end_s)
                if middle_s > start_s:
                    waits = {"for rank": last[id(call)]}
                    events.append(
                        _complete(rank.rank, tid, WAITING, WAITING, start_s - zero_s, middle_s - start_s, waits)
                    )
                if end_s > middle_s and id(call) in last:
                    events.append(
                        _complete(rank.rank, tid, TRANSFER, TRANSFER, middle_s - zero_s, end_s - middle_s, {})
                    )
    for event in events:
        if isinstance(span := event["args"].pop("span", None), Span):
            event["args"] |= _said(span, name)
        if (place := event["args"].pop("place", None)) in name:
            event["args"]["line"] = name[place]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"written by": "labkit"}}


Slice = tuple[str, str, float, float, dict[str, Any]]
"""Name, category, start and end in seconds, arguments."""


def _lanes(rank: RankTrace) -> dict[str, list[Slice]]:
    """Return a rank's slices by lane, in the order in which lanes are shown."""
    lanes: dict[str, list[Slice]] = {
        STEPS: [(f"step {number}", "step", *step, {}) for number, step in enumerate(rank.steps, 1)]
    }
    phases: list[Slice] = [(p.part, p.part, p.start_s, p.end_s, {"place": p.place}) for p in rank.phases]
    lanes |= _apart(PHASES, phases, may_nest=True)
    for lane in sorted({span.lane for span in rank.spans}):
        found: list[Slice] = [(s.name, s.part, s.start_s, s.end_s, {"span": s}) for s in rank.spans if s.lane == lane]
        lanes |= _apart(lane, found, may_nest=True)
    for lane in sorted({call.lane for call in rank.calls}):
        called: list[Slice] = [
            (c.kind, "collective", c.start_s, c.end_s, {"call": c}) for c in rank.calls if c.lane == lane
        ]
        lanes |= _apart(lane, called, may_nest=False)
    return lanes


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
    said: list[tuple[str, int, dict[str, Any]]] = [
        ("process_name", 0, {"name": f"rank {pid} ({rank.machine})"}),
        ("process_sort_index", 0, {"sort_index": pid}),
    ]
    for tid, lane in enumerate(lanes):
        said += [("thread_name", tid, {"name": lane}), ("thread_sort_index", tid, {"sort_index": tid})]
    return [{"ph": "M", "name": what, "pid": pid, "tid": tid, "ts": 0, "args": args} for what, tid, args in said]


def _complete(
    pid: int, tid: int, name: str, category: str, start_s: float, duration_s: float, args: dict[str, Any]
) -> dict[str, Any]:
    times = {"ts": round(1e6 * start_s, 3), "dur": round(1e6 * duration_s, 3)}
    return {"ph": "X", "name": name, "cat": category, "pid": pid, "tid": tid, **times, "args": args}


def _said(one: Span | Call, name: Mapping[Place, str]) -> dict[str, Any]:
    """Return what a viewer shows of an operator, or a collective."""
    said: dict[str, Any] = {}
    if one.shapes:
        said |= {"shapes": str([list(shape) for shape in one.shapes]), "bytes": one.size}
    if one.place in name:
        said["line"] = name[one.place]
    if isinstance(one, Call) and one.key is not None:
        said |= {"group": one.key[0], "number": one.key[1]}
    return said
