"""What each rank has entered and left, compared: the collective in which ranks missed each other."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from labkit.failures.grouping import alike, rank_list
from labkit.failures.stacks import plural
from labkit.rank.recorder import RETURNED, Collectives

EQUAL_SIZES = ("all_reduce", "broadcast", "reduce", "all_gather", "all_reduce_coalesced")
"""Collectives to which every rank brings the same number of elements. To a scatter only the root brings some."""

SILENT = "it did not answer (its process is stopped, or native code holds the GIL)"
"""Why the calls of a rank that did not answer are unknown."""


class Call(NamedTuple):
    """One call of a collective by one rank."""

    group: str
    number: int
    """From 1, in its group."""
    kind: str
    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    done: bool
    began_s: float = 0.0
    """When the rank came to it, by its clock, in seconds; 0 if that is not known."""

    @property
    def met_with(self) -> tuple[object, ...]:
        """What must be equal on all ranks."""
        if self.kind not in EQUAL_SIZES:
            return (self.kind,)
        return self.kind, self.dtype, sum(math.prod(shape) for shape in self.shapes)

    @property
    def title(self) -> str:
        """ "all_reduce #412"."""
        return f"{self.kind} #{self.number}"

    def in_words(self, group: str = "") -> str:
        """ "all_reduce #412 (float32 [3, 5])", with the group that is given: "barrier #2 (group 'metrics')"."""
        details = ", ".join(filter(None, (content(self.shapes, self.dtype), group)))
        return f"{self.title} ({details})" if details else self.title


class Group(NamedTuple):
    """A process group."""

    name: str
    description: str
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        if self.description == "default_pg":
            return "default group"
        is_named = self.description != "undefined"
        return f"group {self.description!r}" if is_named else f"group of {rank_list(list(self.ranks))}"


@dataclass(frozen=True)
class RankCalls:
    """What one rank has called, and where it is."""

    rank: int
    said: Collectives
    """Its answer."""
    place: str = ""
    """The user's line: "Cell In[3], line 14"."""
    doing: str = ""
    """ "is in time.sleep at Cell In[3], line 9"; as `RankStack.in_words`."""
    is_blocked: bool = False
    """Whether it is in a call that waits for other ranks, according to its stack."""

    @property
    def calls(self) -> list[Call]:
        """Its newest calls, the newest last."""
        return [Call(*call) for call in self.said.calls]

    @property
    def transfer(self) -> str:
        """What it is sending or receiving: "recv (float32 [4], from rank 1)"; "" if nothing."""
        if self.said.transfer is None:
            return ""
        how, peer, shape, dtype = self.said.transfer
        whom = f"rank {peer}" if peer >= 0 else "any rank"
        return f"{how} ({content((shape,), dtype)}, {'to' if how == 'send' else 'from'} {whom})"

    @property
    def in_words(self) -> str:
        """What it is doing: "is in time.sleep at …", "waits in recv (float32 [4], from rank 1) at …"."""
        if self.transfer:
            return f"waits in {self.transfer}{_at([self.place])}"
        return self.doing or "has not said where it stands"


class Wait(NamedTuple):
    """A call in which a rank waits for others."""

    in_words: str
    """ "barrier #2 (group of ranks 0 and 1)", "recv (float32 [4], from rank 0)"."""
    absent: tuple[int, ...]
    """The ranks that are not known to have come to it, whether they still can or not."""
    call: Call | None = None
    """The call, if it is a collective that is known."""


class Missed(NamedTuple):
    """The collective in which ranks missed each other."""

    blamed: list[int]
    """The ranks that differ from the others; empty if none does."""
    text: str
    """One line; "" if nothing was found."""
    concerned: tuple[int, ...] = ()
    """The ranks that may be to blame; empty if that is not known."""
    unknown: str = ""
    """What could not be found out, and why; "" if there is nothing."""
    at: tuple[str, int] | None = None
    """The group and the number of the call in which ranks differ; None if they do not, but some have not come."""


NOTHING_MISSED = Missed([], "")

# The problem: ranks wait, each in a call, and PyTorch's recorder has each rank's calls, numbered within their group. In
# which call did they miss each other?
#
# Calls have no names: call #5 of a group on one rank meets #5 on the others. So first comes the earliest number at
# which the calls of two ranks differ in kind or, where sizes must be equal, in size: later calls mean nothing. If there
# is none, it is a call in which some ranks wait and to which other members of the group have not come. A rank that
# waits may itself be missed, in another group or by a rank that wants to receive from it; then those that do not wait
# are to blame. Last come sends and receives: the rank at the end of the chain of those that wait for each other.
#
# What cannot be known: calls older than the newest ones that a rank sends (if the difference is older, only the absent
# ranks are reported); transfers begun by `isend` or `irecv`, which gloo's recorder does not have; the calls of a rank
# that does not answer.


def find(ranks: Sequence[RankCalls]) -> Missed:
    """Return the call in which ranks missed each other, and what could not be known."""
    compared = Comparison(ranks)
    found = compared.difference() or compared.not_entered() or NOTHING_MISSED
    return found._replace(unknown=_unknown(ranks))


class Comparison:
    """The calls of all ranks, compared group by group."""

    def __init__(self, ranks: Iterable[RankCalls]) -> None:
        self.ranks = {each.rank: each for each in ranks}
        self.groups = {group[0]: Group(*group) for each in self.ranks.values() for group in each.said.groups}
        self.entered: dict[tuple[str, int], dict[int, Call]] = {}
        """Who has entered each call, by the call's group and number."""
        self._last: dict[tuple[int, str], Call] = {}
        """The newest call of each rank in each group."""
        for each in self.ranks.values():
            for call in each.calls:
                if call.group in self.groups:
                    self.entered.setdefault((call.group, call.number), {})[each.rank] = call
                    self._last[each.rank, call.group] = call

    def difference(self) -> Missed | None:
        """Return the earliest call of a group in which ranks differ, in kind or in size; None if there is none."""
        for (group, number), calls in sorted(self.entered.items()):
            met = alike((call.met_with, rank) for rank, call in calls.items())
            smallest, *others = sorted(met.values(), key=lambda part: (len(part), part))
            if not others:
                continue
            kind, *differing = {call.kind for call in calls.values()}
            how = "different collectives" if differing else f"{kind} with tensors of different sizes or types"
            parts = [
                f"{_are(part)} in {calls[part[0]].in_words()}{_at(self.ranks[rank].place for rank in part)}"
                for part in (smallest, *others)
            ]
            text = f"ranks met in {how}, call #{number} of the {self.groups[group]}: {'; '.join(parts)}"
            blamed = smallest if len(smallest) < len(others[0]) else []
            return Missed(blamed, text, tuple(sorted(calls)), at=(group, number))
        return None

    def waits(self, rank: int) -> list[Wait]:
        """Return what a rank waits for: its peer in a send or receive, or else its unfinished calls."""
        own = self.ranks.get(rank)
        if own is None:
            return []
        if own.said.transfer is not None:
            _, peer, *_ = own.said.transfer
            return [Wait(own.transfer, (peer,) if peer >= 0 else ())]
        pending = [call for call in own.calls if not call.done and call.group in self.groups]
        return [Wait(self._in_words(call), tuple(self._absent(call)), call) for call in pending]

    def is_known(self, rank: int) -> bool:
        """Return whether a rank's recorder was read: it has then not come to any other call."""
        return rank in self.ranks and not self.ranks[rank].said.unknown

    def not_entered(self) -> Missed | None:
        """Return the calls in which ranks wait, and who has not come to them; None if no rank waits in a call."""
        waits = [found for group in self.groups if (found := self._not_entered_of(group))]
        missed = [found for found in waits if found.blamed]
        if not missed:
            return self._transfers() or next(iter(waits), None)
        text = "; and ".join(found.text for found in missed)
        free = sorted({r for found in missed for r in found.blamed if not any(wait.absent for wait in self.waits(r))})
        if not free and len(missed) > 1:
            text += "; use groups in the same order on every rank"
        fewest, *others = sorted((found.blamed for found in missed), key=len)
        stand_apart = free or (fewest if not others or len(fewest) < len(others[0]) else [])
        return Missed(stand_apart, text, tuple(sorted({rank for found in missed for rank in found.concerned})))

    def _not_entered_of(self, group: str) -> Missed | None:
        """Return the earliest call of a group in which ranks wait, and who has not come to it."""
        number = min((n for (name, n), calls in self.entered.items() if name == group and _pending(calls)), default=0)
        if not number:
            return None
        calls = self.entered[group, number]
        inside = _pending(calls)
        where = _at(self.ranks[rank].place for rank in inside)
        call = calls[inside[0]]
        absent = self._absent(call)
        if known := [rank for rank in absent if self.is_known(rank)]:
            who, it = rank_list(known), f"{rank_list(inside)} {plural('waits in it', len(inside))}{where}"
            parts = [f"{who} {plural('has not', len(known))} entered {self._in_words(call)}; {it}"]
            last = {rank: self._last[rank, group].title for rank in known if (rank, group) in self._last}
            parts += [f"rank {r} {self.ranks[r].in_words} (last entered: {last.get(r, 'none')})" for r in known]
        else:
            parts = [f"{_are(inside)} in {self._in_words(call)}{where}"]
            parts += [f"rank {rank} {self.ranks[rank].in_words}" for rank in absent if rank in self.ranks]
            if not absent:
                parts.append("every rank of the group has entered it: the communication itself does not finish")
        return Missed(known or absent, "; ".join(parts), (*inside, *(known or absent)))

    def _transfers(self) -> Missed | None:
        """Return the ranks for which those wait that send or receive, and what they are doing instead."""
        transfers = {rank: each.said.transfer for rank, each in self.ranks.items() if each.said.transfer}
        waits_for = {rank: peer for rank, (_, peer, *_) in transfers.items() if peer in self.ranks}
        if not waits_for:
            return None
        ends = sorted({*waits_for.values()} - {*waits_for})
        concerned = [*waits_for, *ends]
        text = "; ".join(f"rank {rank} {self.ranks[rank].in_words}" for rank in concerned)
        return Missed(ends, text if ends else f"{rank_list(concerned)} wait for each other: {text}", tuple(concerned))

    def _absent(self, call: Call) -> list[int]:
        """Return the members of its group that are not known to have come to a call."""
        last = {rank: self._last.get((rank, call.group)) for rank in self.groups[call.group].ranks}
        return [rank for rank, newest in last.items() if newest is None or newest.number < call.number]

    def _in_words(self, call: Call) -> str:
        group = self.groups[call.group]
        return call.in_words("" if group.description == "default_pg" else str(group))


def _pending(calls: Mapping[int, Call]) -> list[int]:
    """Return the ranks that are still in a call that all of these have entered."""
    return [rank for rank, call in calls.items() if not call.done]


def _unknown(ranks: Sequence[RankCalls]) -> str:
    """Return what could not be known of the ranks' calls, as text."""
    has_none = ("has", "is still")  # returned, say; or not begun
    due = [each for each in ranks if not (each.said.unknown == SILENT and each.doing.startswith(has_none))]
    why = alike((each.said.unknown, each.rank) for each in due if each.said.unknown not in ("", RETURNED))
    return " ".join(f"Which collectives {rank_list(who)} called is not known: {reason}." for reason, who in why.items())


def content(shapes: tuple[tuple[int, ...], ...], dtype: str) -> str:
    """Return tensors as text: "float32 [3, 5]", "2 tensors, float32 [3, 5] the first"."""
    if not shapes:
        return ""
    first = f"{dtype} {list(shapes[0])}"
    return f"{len(shapes)} tensors, {first} the first" if len(shapes) > 1 else first


def _are(ranks: list[int]) -> str:
    return f"{rank_list(ranks)} {plural('is', len(ranks))}"


def _at(places: Iterable[str]) -> str:
    known = list(dict.fromkeys(place for place in places if place))
    return f" at {' and '.join(known)}" if known else ""
