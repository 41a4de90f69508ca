"""The same collective on all ranks: who came last, and so what of it was waiting and what transfer.

A collective cannot begin to do its work before the last rank has entered it. So what a rank spends in it until then is
waiting for that rank, and the rest is transfer. Calls have no names: what meets what is said by the group and the
number in it. Where PyTorch's recorder knew neither, ranks that made the same calls in the same order are taken to have
met in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from labkit.trace.intervals import Intervals, allot, length, union
from labkit.trace.records import TRANSFER, WAITING, Call, RankTrace

ONE_SIDED = ("send", "recv")


class Meeting(NamedTuple):
    """One collective of several ranks."""

    kind: str
    calls: dict[int, Call]
    """By rank."""

    @property
    def last(self) -> int:
        """The rank that entered it last."""
        return max(self.calls, key=lambda rank: self.calls[rank].start_s)

    @property
    def full_s(self) -> float:
        """When the last rank had entered it."""
        return self.calls[self.last].start_s


def meetings(ranks: Sequence[RankTrace]) -> list[Meeting]:
    """Return the collectives of which every rank of their group tells, in the order in which they were full."""
    sizes = {name: len(members) for rank in ranks for name, members in rank.groups}
    by_key: dict[tuple[str, int], dict[int, Call]] = {}
    for rank in ranks:
        for call in rank.calls:
            if call.key is not None:
                by_key.setdefault(call.key, {})[rank.rank] = call
    found = [calls for key, calls in by_key.items() if len(calls) == sizes.get(key[0], len(ranks))]
    found += _by_order(ranks)
    met = [Meeting(next(iter(calls.values())).kind, calls) for calls in found if len(calls) > 1]
    return sorted(met, key=lambda meeting: meeting.full_s)


def _by_order(ranks: Sequence[RankTrace]) -> list[dict[int, Call]]:
    """Return calls whose group and number nobody knows, by their order."""
    calls = {r.rank: [c for c in r.calls if c.key is None and c.kind not in ONE_SIDED] for r in ranks}
    if len({tuple(call.kind for call in each) for each in calls.values()}) != 1:
        return []
    return [dict(zip(calls, each, strict=True)) for each in zip(*calls.values(), strict=True)]


class RankTime:
    """What one rank did when, without overlap: its own work by part, and waiting and transfer where it did none."""

    def __init__(self, rank: RankTrace, met: Sequence[Meeting]) -> None:
        self.rank = rank
        mine = [meeting for meeting in met if rank.rank in meeting.calls]
        self.last = {id(meeting.calls[rank.rank]): meeting.last for meeting in mine}
        """The rank that entered it last, by the `id` of this rank's call …"""
        full_s = {id(meeting.calls[rank.rank]): meeting.full_s for meeting in mine}
        self.halves = {id(call): self._halves(call, full_s) for call in rank.calls}
        """… and from when to when it waited in it, and from when to when transferred."""
        self.waiting = union(waits for waits, _ in self.halves.values())
        self.transfer = union(transfer for _, transfer in self.halves.values())
        lanes = {span.lane for span in rank.spans}
        on_gpu = any(lane.startswith("stream") for lane in lanes)
        outer = [s for s in rank.spans if not s.depth and s.lane.startswith("stream") == on_gpu]
        self._computed = {
            part: union((s.start_s, s.end_s) for s in outer if s.part == part) for part in {s.part for s in outer}
        }
        self._phases = {
            part: union((p.start_s, p.end_s) for p in rank.phases if p.part == part)
            for part in dict.fromkeys(p.part for p in rank.phases)
        }
        self.busy = union([each for one in (*self._computed.values(), self.loading) for each in one])
        """When it computed, or loaded data."""

    @staticmethod
    def _halves(call: Call, full_s: dict[int, float]) -> tuple[tuple[float, float], tuple[float, float]]:
        middle_s = call.end_s if call.kind == "recv" else full_s.get(id(call), call.start_s)
        middle_s = min(max(middle_s, call.start_s), call.end_s)
        return (call.start_s, middle_s), (middle_s, call.end_s)

    @property
    def loading(self) -> Intervals:
        """When it waited for data."""
        return self._phases.get("data", [])

    def phase(self, part: str) -> Intervals:
        """Return when a part of the step went on, whatever was done in it."""
        return self._phases.get(part, [])

    def by_part(self, span: tuple[float, float]) -> dict[str, Intervals]:
        """Return what the rank did in a stretch of time, by part; each instant counts once.

        Loading comes first, then what is computed; only what neither covers is waiting or transfer, and then the part
        of the step that is going on, in which Python is at work. What is left is "other".
        """
        own = (("data", self.loading), *self._computed.items(), (WAITING, self.waiting), (TRANSFER, self.transfer))
        return allot(span, [*own, *self._phases.items(), ("other", [span])])

    def seconds(self, span: tuple[float, float]) -> dict[str, float]:
        """Return the seconds of a stretch of time by part; they add up to it."""
        return {part: length(when) for part, when in self.by_part(span).items()}
