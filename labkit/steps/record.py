"""What a rank recorded of some steps, and what ranks together say of it: who came last, waiting apart from transfer.

A collective cannot begin to do its work before the last rank has entered it. So what a rank spends in it until then is
waiting for that rank, and the rest is transfer. Calls have no names: what meets what is said by the group and the
number in it. Where PyTorch's recorder knew neither, ranks that made the same calls in the same order are taken to have
met in them.
"""

from __future__ import annotations

import pickle
import platform
import statistics
import zlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from labkit.steps.intervals import Intervals, intersect, length, partition, union

OWN = ("data", "forward", "backward", "optimizer", "other")
"""Parts of a step, as far as a rank's own work goes; "other" is what lies outside of the first four: the loss, say,
logging, and whatever Python does there."""

PARTS = (*OWN, "waiting", "transfer")
"""Those, and the two parts of a collective: until the last rank has entered it, and from then on."""

ONE_SIDED = ("send", "recv")


class Call(NamedTuple):
    """A collective, or a message, from when the rank called it until it had ended there; seconds since 1970."""

    kind: str
    """ "all_reduce"."""
    key: tuple[str, int] | None
    """Group and number in it: what meets what on other ranks. None: not known, or a message."""
    start_s: float
    end_s: float
    size: int = 0
    """Bytes that this rank put in."""


class StepRecord(NamedTuple):
    """All that one rank noted. Of a part that was not asked for, or did not come to pass, nothing."""

    rank: int
    world_size: int
    device: str = "cpu"
    machine: str = platform.node()
    """Ranks of one machine share a clock."""
    steps: tuple[tuple[float, float], ...] = ()
    """From when to when each profiled step lasted."""
    phases: Mapping[str, Intervals] = {}
    busy: Intervals = []
    """When it computed."""
    calls: tuple[Call, ...] = ()
    groups: Mapping[str, int] = {}
    """How many ranks each process group has."""
    timed_s: tuple[float, ...] = ()
    """Seconds of other steps, in which nobody looked …"""
    load: tuple[int, float, float, float] = (0, 0.0, 0.0, 0.0)
    """… and meanwhile: steps, seconds on the clock, seconds that the machine computed, and that this rank did."""
    computed_s: float = float("nan")
    """Seconds of its processor's time that the rank's process took in one of these: other programs do not add to it."""
    threads: int = 0
    """With how many the rank computed."""
    flops: float = float("nan")
    """Of one step."""
    is_threaded: bool = False
    """Whether other threads called the network, `nn.DataParallel`'s: what these copy, compute and keep is not seen."""
    held: Mapping[str, int] = {}
    """Bytes by kind, the most of each in one step."""
    buffers: frozenset[str] = frozenset()
    """The last parts of the names of the network's buffers."""
    file: bytes = b""
    """What Kineto wrote, compressed."""
    unknown: str = ""
    """Why there is less than there should be."""

    def sent(self) -> float:
        """Return the bytes that the rank sends in a step, as textbooks have each call; NaN without steps, or unseen."""
        if not self.steps or self.is_threaded:
            return float("nan")
        ranks_of = (self.groups.get((c.key or ("",))[0], self.world_size) for c in self.calls)
        of_calls = (expected_bytes(c.kind, c.size, n) for c, n in zip(self.calls, ranks_of, strict=True))
        return sum(of_calls) / len(self.steps)

    def moved(self, by_s: float) -> StepRecord:
        """Return the same on another clock."""

        def spans(each: Any) -> Any:
            return [(a + by_s, b + by_s) for a, b in each]

        return self._replace(
            steps=tuple(spans(self.steps)),
            phases={part: spans(when) for part, when in self.phases.items()},
            busy=spans(self.busy),
            calls=tuple(c._replace(start_s=c.start_s + by_s, end_s=c.end_s + by_s) for c in self.calls),
        )

    def followed_by(self, late: StepRecord) -> StepRecord:
        """Return the same with what came when the function was over: the timed steps."""
        fields = {name: getattr(late, name) for name in ("timed_s", "load", "computed_s", "unknown")}
        return self._replace(**fields)

    def pack(self) -> bytes:
        """Return it as it travels."""
        return zlib.compress(pickle.dumps(self), 1)

    @staticmethod
    def unpack(blob: bytes) -> StepRecord:
        """Return what `pack` packed."""
        found: StepRecord = pickle.loads(zlib.decompress(blob))
        return found


def expected_bytes(kind: str, size: int, ranks: int) -> float:
    """Return the bytes that a rank sends for one call, as the mean over ranks has it in textbooks (rings).

    NaN for what is not known.
    """
    others = (ranks - 1) / ranks
    kind = kind.replace("allreduce", "all_reduce").replace("allgather", "all_gather").replace("alltoall", "all_to_all")
    factors = {"all_reduce": 2 * others, "all_gather": ranks - 1, "send": 1, "recv": 0, "barrier": 0, "wait": 0}
    factors |= dict.fromkeys(("reduce", "broadcast", "gather", "scatter", "all_to_all"), others)  # and reduce_scatter
    found = [factor for name, factor in factors.items() if kind.startswith(name)]
    return found[0] * size if found and size else 0.0 if not size else float("nan")


def others_cores(records: Sequence[StepRecord]) -> float:
    """Return how many cores other programs used while steps were timed; NaN if that was too short to say."""
    _, seconds, machine_s, _ = max((r.load for r in records), key=lambda load: load[1], default=(0, 0.0, 0.0, 0.0))
    return max(0.0, machine_s - sum(r.load[3] for r in records)) / seconds if seconds else float("nan")


class RankTime:
    """What one rank did when, without overlap: its own work by part, and waiting and transfer where it did none."""

    def __init__(self, record: StepRecord, met: Mapping[int, Mapping[int, Call]]) -> None:
        self.record = record
        self.met = met
        """By the index of a call, the calls of the ranks that have met in it."""
        self.last = {index: max(calls, key=lambda rank: calls[rank].start_s) for index, calls in met.items()}
        """Which rank entered it last."""
        middles_s = [self._middle(index, call) for index, call in enumerate(record.calls)]
        self.halves = [((c.start_s, m), (m, c.end_s)) for c, m in zip(record.calls, middles_s, strict=True)]
        """Of each call, from when to when the rank waited in it, and from when to when transferred."""
        self.waiting = union(waits for waits, _ in self.halves)
        self.transfer = union(moves for _, moves in self.halves)
        self.busy = union([*record.busy, *record.phases.get("data", [])])
        """When it computed, or loaded data."""

    def _middle(self, index: int, call: Call) -> float:
        full_s = self.met[index][self.last[index]].start_s if index in self.last else call.start_s
        full_s = call.end_s if call.kind == "recv" else full_s
        return min(max(full_s, call.start_s), call.end_s)

    def by_part(self, span: tuple[float, float]) -> dict[str, Intervals]:
        """Return what the rank did in a stretch of time, by part; each instant counts once.

        Loading comes first, then what is computed; only what neither covers is waiting or transfer, and then the part
        of the step that is going on, in which Python is at work. What is left is "other".
        """
        phases = {part: self.record.phases[part] for part in OWN if part in self.record.phases}
        computed = [(part, intersect(when, self.record.busy)) for part, when in phases.items() if part != "data"]
        blocked = [("waiting", self.waiting), ("transfer", self.transfer)]
        outside = ("other", self.record.busy)
        return partition(
            span, [("data", phases.get("data", [])), *computed, outside, *blocked, *phases.items(), ("other", [span])]
        )

    @cached_property
    def seconds(self) -> dict[str, float]:
        """Seconds of a step by part, medians."""
        each = [{part: length(when) for part, when in self.by_part(step).items()} for step in self.record.steps]
        return {part: statistics.median(of.get(part, 0.0) for of in each) for part in PARTS} if each else {}


def times(records: Sequence[StepRecord]) -> list[RankTime]:
    """Return what every rank did when, of those that have recorded steps, on the first one's clock."""
    records = [record for record in records if record.steps]
    apart_s = clocks(records)
    records = [r.moved(apart_s[r.machine]) if apart_s.get(r.machine) else r for r in records]
    met: dict[int, dict[int, dict[int, Call]]] = {record.rank: {} for record in records}
    for calls in meetings(records) if {r.machine for r in records} <= apart_s.keys() else []:
        for rank, (index, _) in calls.items():
            met[rank][index] = {each: call for each, (_, call) in calls.items()}
    return [RankTime(record, met[record.rank]) for record in records]


def meetings(records: Sequence[StepRecord]) -> list[dict[int, tuple[int, Call]]]:
    """Return the collectives of which every rank of their group tells: by rank, the index of the call, and the call."""
    sizes = {name: size for record in records for name, size in record.groups.items()}
    known: dict[tuple[str, int], dict[int, tuple[int, Call]]] = {}
    for record in records:
        for index, call in enumerate(record.calls):
            if call.key is not None:
                known.setdefault(call.key, {})[record.rank] = index, call
    found = [calls for key, calls in known.items() if len(calls) == sizes.get(key[0], len(records))]
    others = {
        r.rank: [(i, c) for i, c in enumerate(r.calls) if c.key is None and c.kind not in ONE_SIDED] for r in records
    }
    if len({tuple(call.kind for _, call in each) for each in others.values()}) == 1:  # else nobody knows what met what
        found += [dict(zip(others, each, strict=True)) for each in zip(*others.values(), strict=True)]
    return [calls for calls in found if len(calls) > 1]


def clocks(records: Sequence[StepRecord]) -> dict[str, float]:
    """Return what is to be added to times of each machine to have them on the first rank's clock.

    Known by all-reduces, which end everywhere at once. A machine of which that is not known is missing.
    """
    machines = {record.rank: record.machine for record in records}
    here = records[0].machine if records else ""
    apart: dict[str, list[float]] = {}
    for calls in meetings(records) if len({*machines.values()}) > 1 else []:
        ends = {machines[rank]: call.end_s for rank, (_, call) in calls.items() if call.kind.startswith("all_reduce")}
        for machine in ends if here in ends else ():
            apart.setdefault(machine, []).append(ends[here] - ends[machine])
    return {here: 0.0, **{machine: statistics.median(each) for machine, each in apart.items()}}
