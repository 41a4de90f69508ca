"""The ledger of ends and waits: which ranks can no longer be met, and which rank others waited for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from labkit.failures.evidence import is_only_evidence, limit_s, watchdog_call
from labkit.failures.facts import Finding, RankFacts
from labkit.failures.grouping import rank_list
from labkit.failures.known_errors import recognise
from labkit.failures.missed import SAME_ORDER, Call, Group, RankCalls, groups_of
from labkit.rank.recorder import Collectives

# The problem: one rank does not come to a collective, and only the ranks that wait for it report anything. gloo over
# TCP tells them that a peer has gone; its libuv transport (macOS) and NCCL do not. A time limit is reported by
# the rank that waited. NCCL's watchdog even aborts that rank.
#
# What does not work: believing what a transport reports, or waiting for a report.
#
# What is done: labkit has its own channel to every rank. So it records who has returned, failed, ended or left its
# process group, and asks the others which call they are in. A rank that waits in a call of a group is stuck if a member
# that has gone did not come to that call: `stuck`. A rank that reports only that another was not there is a victim. To
# blame are the members that had gone, or else those that had not come to its call in time: `explain`.
#
# SLURM and Ray end the others as soon as one has failed. A rank is asked where it is before it is ended so.
#
# What still fails: calls that no recorder has (`isend`, `irecv`; gloo before PyTorch 2.15). A stack alone does not tell
# whether a rank that has returned came to them, and a run is never ended by a guess: the transport's own error ends it,
# or `stall_s`.

CONFIRM_S = 0.5
"""Ranks that seem to wait in vain are asked once more this many seconds later: a message may have been in flight."""

GONE = ("left", "returned", "failed", "ended")
"""How a rank can have gone, those first that are blamed before others."""


class Wait(NamedTuple):
    """The call in which a rank waits, or waited until it gave up."""

    title: str
    """ "barrier #2", "recv"."""
    details: tuple[str, ...]
    """ "float32 [4]"; the group, unless it is the default one."""
    absent: tuple[int, ...]
    """The ranks that have not come to it, whether they still can or not."""
    late: Mapping[int, float]
    """The ranks that came too late, and how many seconds after the first."""
    peer: int | None = None
    """The rank that it sends to or receives from, if it is not a collective."""

    @property
    def has_unknown_peer(self) -> bool:
        """Whether it is a send or a receive whose other rank is unknown: NCCL's watchdog does not name it."""
        return self.peer is None and self.title.partition(" ")[0] in ("send", "recv")

    @property
    def in_words(self) -> str:
        """ "barrier #2 (group of ranks 0 and 1)"."""
        return f"{self.title} ({', '.join(self.details)})" if self.details else self.title


def gone(ranks: Sequence[RankFacts], by_s: float = float("inf")) -> dict[int, str]:
    """Return the ranks that no other can meet any more, and why: "left", "returned", "failed" or "ended".

    Args:
        ranks: What is known of every rank.
        by_s: A time in seconds since the launch. A rank that returned later could still be met at that time.
    """
    found = {}
    for rank in ranks:
        if rank.returned:
            if rank.returned_s <= by_s:
                found[rank.rank] = "returned"
        elif rank.left is not None:
            found[rank.rank] = "left"
        elif rank.failure is not None:
            found[rank.rank] = "failed"
        elif rank.exit_code is not None and not rank.ended_by_us:
            found[rank.rank] = "ended"
    return found


# A run that goes on


def stuck(ranks: Sequence[RankFacts], calls: Sequence[RankCalls]) -> Finding | None:
    """Return the rank that others wait for and that can never come, and the message; None if they may go on."""
    known, how = _Known(ranks, calls), gone(ranks)
    found: dict[int, Wait] = {}
    for own in calls:
        if own.is_blocked and own.rank not in how:
            waits = (wait._replace(absent=tuple(r for r in wait.absent if r in how)) for wait in known.waits(own))
            if wait := next((wait for wait in waits if wait.absent), None):
                found[own.rank] = wait
    if not found:
        return None
    wait = found[min(found)]
    victims = sorted(rank for rank, other in found.items() if (other.absent, other.title) == (wait.absent, wait.title))
    stood = "\n\n".join(f"rank {rank} {known.calls[rank].doing}" for rank in victims)
    cause = (
        f"{rank_list(victims).capitalize()} would have waited indefinitely: no error was reported, for not every "
        f"transport tells a rank that another has gone. Where they waited:\n\n{stood}"
    )
    return known.gone(wait, how, victims, cause)


# A run that has failed


def explain(
    culprit: RankFacts, cause: str, ranks: Sequence[RankFacts], calls: Sequence[RankCalls] = ()
) -> Finding | None:
    """Return the rank that was not there, if a failure only says that some rank was not; else None."""
    if not is_only_evidence(culprit):
        return None
    known = _Known(ranks, _with_watchdog(ranks, calls))
    victim, seen = culprit, [culprit.rank]
    while True:
        limit = limit_s(victim)
        how = gone(ranks, victim.failure.time_s if limit is not None and victim.failure else float("inf"))
        wait = known.given_up(victim)
        met = f"What rank {victim.rank} met:\n\n{cause}"
        free = [r for r in wait.absent if limit is not None and not known.waits_too(r)]
        at_work = [r for r in free if r not in how]
        missing = {r: how[r] for r in wait.absent if how.get(r) in ("left", "returned")}
        if wait.has_unknown_peer and at_work:
            missing, free = {}, at_work  # a rank that has returned has most likely done its part
        if missing:
            return known.gone(wait, missing, [victim.rank], met)
        if limit is None:
            return None
        if blamed := free or sorted(wait.late, key=lambda r: -wait.late[r])[:1]:
            where = [str(stack) for r in blamed if (stack := known.facts[r].stack)]
            page = recognise(victim) or "hang"
            return blamed[0], known.was_late(blamed, limit, victim, wait), "\n\n".join([*where, met]), page
        if not wait.absent:
            return None
        if wait.absent[0] in seen:
            circle = sorted(seen[seen.index(wait.absent[0]) :])
            met = f"What rank {culprit.rank} met:\n\n{cause}"
            return culprit.rank, known.circle(circle), met, "different_collectives"
        victim = known.facts[wait.absent[0]]
        seen.append(victim.rank)


class _Known:
    """All that is known of the ranks and of their calls."""

    def __init__(self, ranks: Sequence[RankFacts], calls: Sequence[RankCalls]) -> None:
        self.facts = {rank.rank: rank for rank in ranks}
        self.calls = {each.rank: each for each in calls}
        self.groups = groups_of(calls)

    def waits(self, own: RankCalls) -> list[Wait]:
        """Return what blocks a rank: its calls that have not finished, or the rank that it sends to or receives from.

        A rank counts as absent only if it is known not to have come.
        """
        if own.said is not None and own.said.transfer is not None:
            return [_transfer(own)]
        waits = [
            self._in_call(own.rank, call, None) for call in own.calls if not call.done and call.group in self.groups
        ]
        unknown = {each.rank for each in self.calls.values() if not each.is_known}
        return [wait._replace(absent=tuple(r for r in wait.absent if r not in unknown)) for wait in waits]

    def given_up(self, victim: RankFacts) -> Wait:
        """Return the call in which a rank gave up, because another rank was not there."""
        own = self.calls.get(victim.rank)
        if own and own.said and own.said.transfer is not None:
            return _transfer(own)
        calls = own.calls if own else []
        pending = [call for call in calls if not call.done][:1] if victim.failure is None else calls[-1:]
        if not pending or pending[0].group not in self.groups:
            return Wait("a collective", (), tuple(r for r in gone([*self.facts.values()]) if r != victim.rank), {})
        return self._in_call(victim.rank, pending[0], limit_s(victim))

    def waits_too(self, number: int) -> bool:
        """Return whether a rank that did not come to a call was itself waiting in another, for one that was absent."""
        rank, own = self.facts[number], self.calls.get(number)
        is_in_one = own and own.said and (own.said.transfer is not None or not all(call.done for call in own.calls))
        return bool(is_in_one or is_only_evidence(rank)) and bool(self.given_up(rank).absent)

    def _in_call(self, rank: int, call: Call, limit: float | None) -> Wait:
        """Return a call of a group with the members that did not come to it, or only after its time limit."""
        group = self.groups[call.group]
        absent: list[int] = []
        late: dict[int, float] = {}
        for member in group.ranks:
            if member == rank:
                continue
            own = self.calls[member].in_group(group.name) if member in self.calls else {}
            if max(own, default=0) < call.number:
                absent.append(member)
            elif limit and call.number in own and call.began_s:
                after_s = own[call.number].began_s - call.began_s
                late |= {member: after_s} if after_s > 0.95 * limit else {}
        details = (call.content, "" if group.description == "default_pg" else str(group))
        return Wait(call.title, tuple(filter(None, details)), tuple(absent), late)

    # In words

    def gone(self, wait: Wait, how: Mapping[int, str], victims: list[int], cause: str) -> Finding:
        """Blame those that can never come: of several those that left, or else returned, failed or ended."""
        kind = min((how[rank] for rank in wait.absent if rank in how), key=GONE.index)
        blamed = [rank for rank in wait.absent if how.get(rank) == kind]
        who, it, its = rank_list(blamed), *(("it", "its") if len(blamed) == 1 else ("them", "their"))
        how_so = "with" if wait.peer is None else "from" if wait.title == "recv" else "to"
        others = f"{rank_list(victims)} {'was' if len(victims) == 1 else 'were'}"
        doing = f"{others} still in {wait.in_words} {how_so} {it}"
        headline = f"{who} {kind} while {doing}: every rank must take part in the same collectives"
        if left := self.facts[blamed[0]].left if kind == "left" else None:
            place = f"destroy_process_group at {left.place}" if left.place else "destroy_process_group"
            headline = f"{who} left {its} process group ({place}) while {doing}"
        return blamed[0], headline, cause, "returned_early"

    def was_late(self, blamed: list[int], limit: float, victim: RankFacts, wait: Wait) -> str:
        """Blame those that did not come in time."""
        at = victim.stack or self.calls.get(victim.rank)
        place = at.place if at else ""
        waited = f"where rank {victim.rank} waited{f' at {place}' if place else ''}"
        headline = f"{rank_list(blamed)} did not come to {wait.in_words} within {limit:g} s, {waited}"
        if wait.peer is not None:
            verb = "send to" if wait.title == "recv" else "receive from"
            headline = (
                f"{rank_list(blamed)} did not {verb} rank {victim.rank} within {limit:g} s: {wait.in_words}, {waited}"
            )
        for rank in blamed:
            if rank in wait.late:
                headline += f"; rank {rank} came {wait.late[rank]:.1f} s after it"
            elif stack := self.facts[rank].stack:
                headline += f"; rank {rank} {stack.in_words}"
        return headline

    def circle(self, ranks: list[int]) -> str:
        """Say in which calls ranks waited for each other."""
        waits = {rank: self.given_up(self.facts[rank]) for rank in ranks}
        each = ", ".join(f"rank {rank} in {wait.in_words}" for rank, wait in waits.items())
        hint = f": {SAME_ORDER}" if len({wait.details[-1:] for wait in waits.values()}) > 1 else ""
        return f"{rank_list(ranks)} waited for each other, {each}{hint}"


def _transfer(own: RankCalls) -> Wait:
    assert own.said is not None
    assert own.said.transfer is not None
    how, peer, *_ = own.said.transfer
    return Wait(how, (own.transferred,), (peer,) if peer >= 0 else (), {}, peer if peer >= 0 else None)


def _with_watchdog(ranks: Sequence[RankFacts], calls: Sequence[RankCalls]) -> list[RankCalls]:
    """Add the calls of ranks that NCCL's watchdog has aborted, from what it wrote: they cannot answer any more."""
    by_rank = {each.rank: each for each in calls}
    known = groups_of(calls)
    told = {each.rank: [name for name, *_ in each.said.groups] for each in calls if each.said and each.said.groups}
    for rank in ranks:
        found = watchdog_call(rank)
        before = by_rank.get(rank.rank)
        if found is None or (before is not None and before.calls):
            continue
        group, description, number, kind = found
        members = tuple(r.rank for r in ranks if r is rank or group in told.get(r.rank, [group]))
        name, description, members, _ = known.get(group) or Group(group, description, members)
        said = Collectives(rank.rank, ((group, number, kind, (), "", False),), ((name, description, members),))
        by_rank[rank.rank] = RankCalls(rank.rank, said, before.place if before else "")
    return list(by_rank.values())
