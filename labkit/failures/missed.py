"""The collective in which ranks missed each other, from every rank's flight recorder."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from labkit.failures.grouping import alike, rank_list
from labkit.failures.stacks import plural
from labkit.rank.recorder import RETURNED, Collectives

EQUAL_SIZES = ("all_reduce", "broadcast", "reduce", "all_gather", "all_reduce_coalesced")
"""Collectives to which every rank brings the same number of elements. To a scatter only the root brings some."""

ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth")
"""Words for groups of the same ranks."""

SAME_ORDER = "use groups in the same order on every rank"
"""What to do if ranks wait for each other in different groups."""


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

    @property
    def content(self) -> str:
        """ "float32 [3, 5]", "4 MiB float32 [1024, 1024]", "2 tensors, 4 MiB float32"; "" of a barrier."""
        return content(self.shapes, self.dtype)


@dataclass(frozen=True)
class RankCalls:
    """What is known of one rank when the run makes no progress."""

    rank: int
    said: Collectives | None = None
    """Its answer; None if there was none."""
    place: str = ""
    """The user's line: "Cell In[3], line 14"."""
    doing: str = ""
    """ "is in time.sleep at Cell In[3], line 9"; as `RankStack.in_words`."""
    is_blocked: bool = False
    """Whether it is in a call that waits for other ranks, according to its stack."""

    @property
    def transferred(self) -> str:
        """The tensor that it is sending or receiving: "float32 [4]"; "" if there is none."""
        if self.said is None or self.said.transfer is None:
            return ""
        return content((self.said.transfer[2],), self.said.transfer[3])

    @property
    def calls(self) -> list[Call]:
        """Its newest calls, the newest last."""
        return [Call(*call) for call in self.said.calls] if self.said else []

    def in_group(self, group: str) -> dict[int, Call]:
        """Its calls in one group, by number."""
        return {call.number: call for call in self.calls if call.group == group}

    @property
    def is_known(self) -> bool:
        """Whether its recorder was read."""
        return self.said is not None and not self.said.unknown

    @property
    def in_words(self) -> str:
        """What it is doing, and the other rank if it sends or receives."""
        if self.said is None or self.said.transfer is None:
            return self.doing or "has not said where it stands"
        how, peer, *_ = self.said.transfer
        whom = f"rank {peer}" if peer >= 0 else "any rank"
        what = f"waits to send {self.transferred} to" if how == "send" else f"waits for {self.transferred} from"
        return f"{what} {whom}" + (f" at {self.place}" if self.place else "")


class Missed(NamedTuple):
    """The collective in which ranks missed each other."""

    blamed: list[int]
    """The ranks that differ from the others; empty if none does."""
    text: str
    """One line; "" if nothing was found."""
    unknown: str = ""
    """What could not be found out, and why; "" if there is nothing."""
    waiting: tuple[int, ...] = ()
    """The ranks that wait in the call, if it is a single one."""
    concerned: tuple[int, ...] = ()
    """The ranks that may be to blame; empty if that is not known."""


NOTHING_MISSED = Missed([], "")


class Difference(NamedTuple):
    """The earliest call of a group in which ranks differ."""

    blamed: list[int]
    """The smallest set of ranks with the same call; empty if there are two of that size."""
    number: int
    group: str
    kind: str
    """The kind of the call; "" if ranks differ in it."""
    concerned: tuple[int, ...]
    """All ranks that have made the call."""
    parts: str
    """ "rank 1 is in barrier #2 at …; ranks 0 and 2 are in all_reduce #2 (float32 [1]) at …"."""

    def __str__(self) -> str:
        how = ", by type or size" if self.kind else ""
        return f"ranks differ in call #{self.number} of the {self.group}{how}: {self.parts}"


class Group(NamedTuple):
    """A process group."""

    name: str
    description: str
    ranks: tuple[int, ...]
    ordinal: str = ""
    """Which of several groups with the same description it is, in the order in which they were made: "second"."""

    def __str__(self) -> str:
        if self.description == "default_pg":
            return "default group"
        which = f"{self.ordinal} " if self.ordinal else ""
        if self.description == "undefined":
            return f"{which}group of {rank_list(list(self.ranks))}"
        return f"{which}group {self.description!r}" + (f" of {rank_list(list(self.ranks))}" if self.ordinal else "")


# The problem: ranks wait, each in a call, and PyTorch's recorder has each rank's calls, numbered within their group. In
# which call did they miss each other?
#
# Calls have no names: call #5 of a group on one rank meets #5 on the others. So first comes the earliest number at
# which the calls of two ranks differ in kind or, where sizes must be equal, in size: later calls mean nothing. If there
# is none, it is a call in which some ranks wait and to which other members of the group have not come. A rank that
# waits may itself be missed, in another group or by a rank that wants to receive from it; then both are reported. Among
# transfers, it is ranks that wait for each other in a circle.
#
# What cannot be known: calls older than the newest ones that a rank sends (if the difference is older, only the absent
# ranks are reported); transfers begun by `isend` or `irecv`, which gloo's recorder does not have; the calls of a rank
# that does not answer.


def find(ranks: list[RankCalls]) -> Missed:
    """Return the call in which ranks missed each other, and what could not be known."""
    groups = groups_of(ranks)
    unknown = _unknown(ranks)
    if difference := differing(ranks):
        return Missed(difference.blamed, str(difference), unknown, concerned=difference.concerned)
    missed = [found for group in groups.values() if (found := _not_entered(ranks, group))]
    circle, in_circle = _circle(ranks)
    if missed:
        texts = [found.text for found in missed] + ([circle] if circle else [])
        fewest = min((found.blamed for found in missed), key=len)
        even = len(missed) > 1 and len({len(found.blamed) for found in missed}) == 1
        same_order = f"; {SAME_ORDER}" if _in_other_orders(missed) else ""
        concerned = sorted({*in_circle, *(rank for found in missed for rank in (*found.waiting, *found.blamed))})
        said = "; and ".join(texts) + same_order
        return Missed([] if even else fewest, said, unknown, concerned=tuple(concerned))
    if circle:
        return Missed([], circle, unknown, concerned=in_circle)
    return (_awaited(ranks) or _all_there(ranks, groups.values()) or NOTHING_MISSED)._replace(unknown=unknown)


def differing(ranks: list[RankCalls]) -> Difference | None:
    """Return the earliest call of a group in which ranks differ, in kind or in size; None if there is none."""
    return next((found for group in groups_of(ranks).values() if (found := _differing_in(ranks, group))), None)


def groups_of(ranks: Sequence[RankCalls]) -> dict[str, Group]:
    """Return the groups that ranks have reported, by name. Those with the same description are numbered."""
    groups = {group[0]: Group(*group) for r in ranks if r.said for group in r.said.groups}
    for alike_ones in alike(((g.description, g.ranks), index) for index, g in enumerate(groups.values())).values():
        names = [list(groups)[index] for index in alike_ones]
        if len(names) > 1:
            for name, ordinal in zip(names, ORDINALS, strict=False):
                groups[name] = groups[name]._replace(ordinal=ordinal)
    return groups


def _differing_in(ranks: list[RankCalls], group: Group) -> Difference | None:
    by_rank = {r.rank: r.in_group(group.name) for r in ranks}
    for number in sorted({number for calls in by_rank.values() for number in calls}):
        at = {rank: calls[number] for rank, calls in by_rank.items() if number in calls}
        meet = alike((call.met_with, rank) for rank, call in at.items())
        parts = sorted(meet.values(), key=lambda part: (len(part), part))
        if len(parts) < 2:
            continue
        places = {r.rank: r.place for r in ranks}
        said = [
            f"{_are(part)} in {at[part[0]].title}{_in_brackets(at[part[0]].content)}{_at(places[r] for r in part)}"
            for part in parts
        ]
        kinds = {call.kind for call in at.values()}
        return Difference(
            parts[0] if len(parts[0]) < len(parts[1]) else [],
            number,
            str(group),
            kinds.pop() if len(kinds) == 1 else "",
            tuple(sorted(at)),
            "; ".join(said),
        )
    return None


def _in_other_orders(missed: list[Missed]) -> bool:
    """Return whether some ranks wait in one group for ranks that wait for them in another."""
    return any(
        set(one.waiting) & set(two.blamed) and set(two.waiting) & set(one.blamed) for one in missed for two in missed
    )


def _not_entered(ranks: list[RankCalls], group: Group) -> Missed | None:
    """Return the call of a group in which some ranks wait and to which others have not come."""
    here = [r for r in ranks if r.rank in group.ranks]
    waiting = {r.rank: min((c for c in r.in_group(group.name).values() if not c.done), default=None) for r in here}
    first = min((call for call in waiting.values() if call), key=lambda call: call.number, default=None)
    if first is None:
        return None
    last = {r.rank: max(r.in_group(group.name), default=0) for r in here}
    absent = [r for r in here if r.is_known and last[r.rank] < first.number]
    if not absent:
        return None
    in_it = [r for r in here if (call := waiting[r.rank]) and call.number == first.number]
    details = ", ".join(filter(None, (first.content, str(group))))
    waits = f"{rank_list([r.rank for r in in_it])} {plural('waits in it', len(in_it))}{_at(r.place for r in in_it)}"
    who = [r.rank for r in absent]
    free = [r.rank for r in absent if not (r.said and r.said.transfer)]  # one that waits for another is not to blame
    text = f"{rank_list(who)} {plural('has not', len(who))} entered {first.title} ({details}; {waits}); "
    last_of = "; ".join(_last_of(r, group, alone=len(who) == 1) for r in absent)
    return Missed(free or who, text + last_of, waiting=tuple(r.rank for r in in_it))


def _last_of(rank: RankCalls, group: Group, alone: bool) -> str:
    calls = rank.in_group(group.name)
    whose = "its" if alone else f"rank {rank.rank}'s"
    last = (
        f"{whose} last was {calls[max(calls)].title}"
        if calls
        else f"{'it' if alone else f'rank {rank.rank}'} has called none"
    )
    own = next((c for c in rank.calls if not c.done and c.group != group.name), None)
    return f"{last}, and it {rank.in_words}" + (f" ({own.title})" if own else "")


def _circle(ranks: list[RankCalls]) -> tuple[str, tuple[int, ...]]:
    """Return the ranks that wait for each other to send or receive, in a circle: as text, and by number."""
    waits_for = {r.rank: r.said.transfer[1] for r in ranks if r.said and r.said.transfer}
    by_rank = {r.rank: r for r in ranks}
    for start in sorted(waits_for):
        path = [start]
        while (after := waits_for.get(path[-1])) is not None and after not in path:
            path.append(after)
        if after == start:
            ring = " → ".join(f"{rank}" for rank in [*path, start])
            each = "; ".join(f"rank {rank} {by_rank[rank].in_words}" for rank in path)
            return f"{rank_list(sorted(path))} wait for each other in a ring, {ring}: {each}", tuple(sorted(path))
    return "", ()


def _awaited(ranks: list[RankCalls]) -> Missed | None:
    """Return the ranks for which those wait that send or receive, and what they are doing instead."""
    by_rank = {r.rank: r for r in ranks}
    waits_for = {r.rank: r.said.transfer[1] for r in ranks if r.said and r.said.transfer}
    ends = sorted({peer for peer in waits_for.values() if peer not in waits_for and peer in by_rank})
    if not ends:
        return None
    parts = [f"rank {rank} {by_rank[rank].in_words}" for rank in [*waits_for, *ends]]
    return Missed(ends, "; ".join(parts), concerned=(*waits_for, *ends))


def _all_there(ranks: list[RankCalls], groups: Iterable[Group]) -> Missed | None:
    """Return the call in which all those ranks of a group are that have answered."""
    for group in groups:
        here = [r for r in ranks if r.rank in group.ranks]
        inside = {r.rank: call for r in here for call in r.in_group(group.name).values() if not call.done}
        if not inside:
            continue
        call = inside[min(inside)]
        details = ", ".join(filter(None, (call.content, str(group))))
        silent = [r.rank for r in here if not r.is_known]
        who = f"{_are(sorted(inside))} in {call.title} ({details})"
        where = _at(r.place for r in here if r.rank in inside)
        others = "".join(f"; rank {r.rank} {r.in_words}" for r in here if r.rank in silent)
        rest = others or "; every rank of the group has entered it: the transfer itself does not end"
        return Missed(silent, f"{who}{where}{rest}", concerned=group.ranks)
    return None


def _unknown(ranks: list[RankCalls]) -> str:
    """Return what could not be known of the ranks' calls, as text."""
    silent = "it did not answer: its process is stopped, or native code holds the GIL"
    ended = ("has", "is still")  # returned, say; or not begun
    told = {r.rank: r.said.unknown for r in ranks if r.said and r.said.unknown != RETURNED}
    said = [(told[r.rank] if r.rank in told else "" if r.doing.startswith(ended) else silent, r.rank) for r in ranks]
    why = alike(each for each in said if each[0])
    return " ".join(f"Which collectives {rank_list(who)} called is not known: {reason}." for reason, who in why.items())


def content(shapes: tuple[tuple[int, ...], ...], dtype: str) -> str:
    """Return tensors as text: "float32 [3, 5]", "4 MiB float32 [1024, 1024]", "2 tensors, 4 MiB float32"."""
    if not shapes:
        return ""
    size = sum(math.prod(shape) for shape in shapes) * getattr(torch, dtype, torch.uint8).itemsize
    large = next((f"{size / unit:.3g} {name} " for unit, name in ((2**30, "GiB"), (2**20, "MiB")) if size >= unit), "")
    shape = f" {list(shapes[0])}" if len(shapes) == 1 else ""
    return f"{f'{len(shapes)} tensors, ' if len(shapes) > 1 else ''}{large}{dtype}{shape}"


def _are(ranks: list[int]) -> str:
    return f"{rank_list(ranks)} {plural('is', len(ranks))}"


def _in_brackets(text: str) -> str:
    return f" ({text})" if text else ""


def _at(places: Iterable[str]) -> str:
    known = list(dict.fromkeys(place for place in places if place))
    return f" at {' and '.join(known)}" if known else ""
