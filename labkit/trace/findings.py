"""What costs time, said in words: a rank for which the others wait, an input-bound loop, a transfer beside nothing."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from labkit.trace.intervals import intersect, length, subtract, union
from labkit.trace.meeting import Meeting, RankTime
from labkit.trace.records import NOWHERE, TRANSFER, WAITING, Place, RankTrace

LEAST_S, LEAST_SHARE = 1e-3, 0.1
"""A rank is a straggler if the others wait for it longer in a step than both: in seconds, and of a step."""

MOST_STEPS = 0.8
"""A straggler is late in this share of the steps: by half of what it is in the median, or more."""

INPUT_BOUND = 0.5
"""Share of a step from which on a loop is bound by its input."""

TRANSFERS, OVERLAPS = 0.05, 0.2
"""Transfers count if they take this share of a step, and do not overlap if less than this of them does."""

AVERAGING = ("all_reduce", "allreduce", "reduce_scatter")
"""Collectives that average gradients, by the beginning of their names."""

SAID = {"data": "DataLoader", "forward": "forward", "backward": "backward", "optimizer": "the optimizer's step"}


class Straggler(NamedTuple):
    """A rank for which the others wait in every step."""

    rank: int
    late_s: float
    """How long the others wait for it in a step; the median of the others, and of the steps."""
    kind: str
    """In which collective: "all_reduce"."""
    is_every: bool
    """Whether it is as late to every one of these."""
    part: str
    """Where it spends the time: one of `labkit.trace.records.PARTS`."""
    place: Place
    """The line of the reader's code in which it does."""
    where: str
    """That line in words, "Cell In[3], line 9"; "" if it is not known."""

    @property
    def text(self) -> str:
        """ "rank 2 is 48 ms late to every all_reduce: its time goes into DataLoader (Cell In[3], line 9)"."""
        ms = f"{1000 * self.late_s:.3g} ms"
        late = f"is {ms} late to every {self.kind}"
        if not self.is_every:
            late = f"keeps the others waiting {ms} a step in {self.kind}"
        into = SAID.get(self.part, "")
        at = f" ({self.where})" if into and self.where else self.where
        return f"rank {self.rank} {late}: its time goes into {into + at or 'Python, outside of PyTorch'}"

    def __str__(self) -> str:
        return self.text


class Finding(NamedTuple):
    """Something that costs time."""

    kind: str
    """ "straggler", "input-bound", "no overlap"."""
    text: str
    share: float
    """Of a step, the median of ranks and steps."""

    def __str__(self) -> str:
        return self.text


def steps_of(ranks: Sequence[RankTrace]) -> int:
    """Return how many steps every rank has recorded."""
    return min((len(rank.steps) for rank in ranks), default=0)


def waits_for(times: Sequence[RankTime], met: Sequence[Meeting], step: int) -> dict[int, float]:
    """Return how long other ranks wait for each rank in a step, in seconds: the median of those that meet it.

    Nobody waits while he computes: a collective that goes on beside a backward pass costs nothing until that is done.
    """
    found: dict[int, list[float]] = {}
    for time in times:
        me, (start_s, end_s) = time.rank.rank, time.rank.steps[step]
        mine = [m for m in met if me in m.calls and start_s <= m.calls[me].start_s < end_s]
        for other in {rank for meeting in mine for rank in meeting.calls} - {me}:
            spent = union((m.calls[me].start_s, min(m.full_s, m.calls[me].end_s)) for m in mine if m.last == other)
            found.setdefault(other, []).append(length(subtract(spent, time.busy)))
    return {rank: statistics.median(waited) for rank, waited in found.items()}


def straggler(times: Sequence[RankTime], met: Sequence[Meeting], name: dict[Place, str]) -> Straggler | None:
    """Return the rank for which the others wait in every step, or None if there is none."""
    steps = range(steps_of([time.rank for time in times]))
    waited = [waits_for(times, met, step) for step in steps]
    candidates = {rank for each in waited for rank in each}
    if not candidates:
        return None
    late = {rank: statistics.median(each.get(rank, 0.0) for each in waited) for rank in candidates}
    rank = max(late, key=lambda one: late[one])
    lengths = [end - start for time in times for start, end in time.rank.steps]
    is_late = [each.get(rank, 0.0) > late[rank] / 2 for each in waited]
    if late[rank] < max(LEAST_S, LEAST_SHARE * statistics.median(lengths)) or statistics.mean(is_late) < MOST_STEPS:
        return None
    behind = [m for m in met if m.last == rank and _late(m) > late[rank] / 2]
    kind = Counter(meeting.kind for meeting in behind or met).most_common(1)[0][0]
    of_kind = [meeting for meeting in met if meeting.kind == kind and rank in meeting.calls]
    is_every = len([meeting for meeting in behind if meeting.kind == kind]) >= 0.8 * len(of_kind)
    part, place = _where(times, rank, late[rank])
    return Straggler(rank, late[rank], kind, is_every, part, place, name.get(place, ""))


def _late(meeting: Meeting) -> float:
    """Return how long the others wait in a collective for the last; the median."""
    last = meeting.last
    return statistics.median(meeting.full_s - call.start_s for rank, call in meeting.calls.items() if rank != last)


def _where(times: Sequence[RankTime], rank: int, late_s: float) -> tuple[str, Place]:
    """Return the part of the step, and the line, in which a rank spends more than the others do."""
    (own,) = [time for time in times if time.rank.rank == rank]
    others = [time for time in times if time.rank.rank != rank]
    steps = range(steps_of([time.rank for time in times]))

    def excess(of: list[dict[object, float]], beside: list[list[dict[object, float]]]) -> tuple[object, float]:
        keys = {key for each in of for key in each}
        more = {
            key: statistics.median(each.get(key, 0.0) for each in of)
            - statistics.median(statistics.median(each.get(key, 0.0) for each in other) for other in beside)
            for key in keys
        }
        best = max(more, key=lambda key: more[key])
        return best, more[best]

    def parts(time: RankTime) -> list[dict[object, float]]:
        found = [time.seconds(time.rank.steps[step]) for step in steps]
        return [{p: s for p, s in each.items() if p not in (WAITING, TRANSFER)} for each in found]

    def lines(time: RankTime) -> list[dict[object, float]]:
        return [dict(by_line(time, time.rank.steps[step])) for step in steps]

    part, _ = excess(parts(own), [parts(time) for time in others])
    place: object = NOWHERE
    if own.rank.lines:
        found, more_s = excess(lines(own), [lines(time) for time in others])
        place = found if more_s > late_s / 2 else NOWHERE
    return str(part), place  # type: ignore[return-value]


def by_line(time: RankTime, span: tuple[float, float]) -> dict[Place, float]:
    """Return the seconds that a rank spends in each line of the reader's code, waiting and transfer left out."""
    found: dict[Place, float] = {}
    parts = time.by_part(span)
    own = union(each for part, when in parts.items() if part not in (WAITING, TRANSFER) for each in when)
    ends = [at for at, _ in time.rank.lines[1:]] + [span[1]]
    by_place: dict[Place, list[tuple[float, float]]] = {}
    for (at, place), end in zip(time.rank.lines, ends, strict=False):
        by_place.setdefault(place, []).append((max(at, span[0]), min(end, span[1])))
    for place, when in by_place.items():
        if seconds := length(intersect(union(when), own)):
            found[place] = seconds
    return found


def input_bound(times: Sequence[RankTime]) -> Finding | None:
    """Return that every rank spends most of its steps in loading data, if so."""
    shares = [
        statistics.median(time.seconds(step)["data"] / (step[1] - step[0]) for step in time.rank.steps)
        for time in times
        if time.rank.steps
    ]
    if not shares or min(shares) < INPUT_BOUND:
        return None
    share = statistics.median(shares)
    return Finding(
        "input-bound",
        f"an input-bound loop: every rank spends {share:.0%} of a step in DataLoader; what is computed meanwhile would "
        "be free, with num_workers, say",
        share,
    )


class Averaging(NamedTuple):
    """How gradients travel: medians of ranks and steps."""

    share: float
    """Of a step in which they do; waiting for ranks left out."""
    beside: float
    """Share of that in which the rank computes; NaN without any."""
    kind: str
    place: Place


def averaging(times: Sequence[RankTime]) -> Averaging:
    """Return how the collectives that are called from the backward pass on go together with it."""
    shares, beside, kinds = [], [], Counter[tuple[str, Place]]()
    for time in times:
        for start_s, end_s in time.rank.steps:
            calls = [c for c in time.rank.calls if c.kind.startswith(AVERAGING) and start_s <= c.start_s < end_s]
            backward = intersect(time.phase("backward"), [(start_s, end_s)])
            calls = [call for call in calls if backward and call.start_s >= backward[0][0]]
            sent = intersect(union((call.start_s, call.end_s) for call in calls), time.transfer)
            shares.append(length(sent) / (end_s - start_s))
            if sent:
                beside.append(length(intersect(sent, time.busy)) / length(sent))
                kinds.update((call.kind, call.place) for call in calls)
    (kind, place), _ = kinds.most_common(1)[0] if kinds else (("", NOWHERE), 0)
    return Averaging(
        statistics.median(shares) if shares else 0.0,
        statistics.median(beside) if beside else float("nan"),
        kind,
        place,
    )


def no_overlap(times: Sequence[RankTime], name: dict[Place, str]) -> Finding | None:
    """Return that gradients are averaged while nothing is computed, if so."""
    found = averaging(times)
    if not (found.share >= TRANSFERS and found.beside < OVERLAPS):
        return None
    at = f" ({name[found.place]})" if name.get(found.place) else ""
    return Finding(
        "no overlap",
        f"{found.kind}{at} does not overlap with backward: for {found.share:.0%} of a step gradients travel and "
        "nothing is computed",
        found.share,
    )
