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
    how = gone(ranks)
    by_rank = {each.rank: each for each in calls}
    found: list[tuple[int, Wait]] = []
    for rank in ranks:
        own = by_rank.get(rank.rank)
        if own is None or rank.rank in how or not own.is_blocked:
            continue
        for wait in _waits(own, calls):
            missing = tuple(other for other in wait.absent if other in how)
            if missing:
                found.append((rank.rank, wait._replace(absent=missing)))
                break
    if not found:
        return None
    first, wait = found[0]
    victims = [rank for rank, other in found if other.absent == wait.absent and other.title == wait.title]
    blamed = _of_one_kind(wait.absent, how)
    facts = {rank.rank: rank for rank in ranks}
    headline = _gone_headline(blamed, how[blamed[0]], victims, wait, facts)
    stood = "\n\n".join(f"rank {each.rank} {each.doing}" for each in calls if each.rank in victims)
    cause = (
        f"{rank_list(victims).capitalize()} would have waited indefinitely: no error was reported, for not every "
        f"transport tells a rank that another has gone. Where they waited:\n\n{stood}"
    )
    return blamed[0], headline, cause, "returned_early"


def _waits(own: RankCalls, calls: Sequence[RankCalls]) -> list[Wait]:
    """Return what blocks a rank: its calls that have not finished, or the rank that it sends to or receives from.

    A rank counts as absent only if it is known not to have come.
    """
    if own.said is not None and own.said.transfer is not None:
        return [_transfer(own.said)]
    groups = groups_of(calls)
    pending = [call for call in own.calls if not call.done and call.group in groups]
    unknown = {each.rank for each in calls if not each.is_known}
    waits = [_in_call(own.rank, call, groups[call.group], calls, None) for call in pending]
    return [wait._replace(absent=tuple(rank for rank in wait.absent if rank not in unknown)) for wait in waits]


# A run that has failed


def explain(
    culprit: RankFacts, cause: str, ranks: Sequence[RankFacts], calls: Sequence[RankCalls] = ()
) -> Finding | None:
    """Return the rank that was not there, if a failure only says that some rank was not; else None."""
    if not is_only_evidence(culprit):
        return None
    by_rank = {each.rank: each for each in _with_watchdog(ranks, calls)}
    facts = {rank.rank: rank for rank in ranks}
    victim, seen = culprit, [culprit.rank]
    while True:
        limit = limit_s(victim)
        how = gone(ranks, victim.failure.time_s if limit is not None and victim.failure else float("inf"))
        wait = _given_up(victim, list(by_rank.values()), ranks)
        absent = [r for r in wait.absent if r != victim.rank]
        free = [r for r in absent if limit is not None and not _waits_too(facts[r], list(by_rank.values()), ranks)]
        missing = _of_one_kind([r for r in absent if how.get(r) in ("left", "returned")], how)
        at_work = [r for r in free if r not in how]
        if wait.has_unknown_peer and at_work:
            missing, free = [], at_work  # a rank that has returned has most likely done its part
        if missing:
            return (
                missing[0],
                _gone_headline(missing, how[missing[0]], [victim.rank], wait, facts),
                _met(victim, cause),
                "returned_early",
            )
        if limit is None:
            return None
        if blamed := free or sorted(wait.late, key=lambda r: -wait.late[r])[:1]:
            return (
                blamed[0],
                _late_headline(blamed, limit, victim, wait, by_rank, facts),
                _met(victim, cause, [facts[r] for r in blamed]),
                recognise(victim).page or "hang",
            )
        if not absent:
            return None
        if absent[0] in seen:
            return _circle(seen[seen.index(absent[0]) :], by_rank, ranks, cause, culprit)
        victim = facts[absent[0]]
        seen.append(victim.rank)


def _met(victim: RankFacts, cause: str, blamed: Sequence[RankFacts] = ()) -> str:
    where = [str(rank.stack) for rank in blamed if rank.stack]
    return "\n\n".join([*where, f"What rank {victim.rank} met:\n\n{cause}"])


def _with_watchdog(ranks: Sequence[RankFacts], calls: Sequence[RankCalls]) -> list[RankCalls]:
    """Add the calls of ranks that NCCL's watchdog has aborted, from what it wrote: they cannot answer any more."""
    by_rank = {each.rank: each for each in calls}
    for rank in ranks:
        found = watchdog_call(rank)
        before = by_rank.get(rank.rank)
        if found is None or (before is not None and before.calls):
            continue
        group, description, number, kind = found
        told = {each.rank: [name for name, *_ in each.said.groups] for each in calls if each.said and each.said.groups}
        members = tuple(each.rank for each in ranks if group in told.get(each.rank, [group]))
        known = groups_of(calls).get(group) or Group(group, description, members)
        said = Collectives(rank.rank, ((group, number, kind, (), "", False),), (tuple(known[:3]),))  # type: ignore[arg-type]
        by_rank[rank.rank] = RankCalls(rank.rank, said, before.place if before else "")
    return list(by_rank.values())


def _given_up(victim: RankFacts, calls: Sequence[RankCalls], ranks: Sequence[RankFacts]) -> Wait:
    """Return the call in which a rank gave up, because another rank was not there."""
    own = next((each for each in calls if each.rank == victim.rank), None)
    others = tuple(rank.rank for rank in ranks if rank.rank != victim.rank)
    if own is None or own.said is None:
        return Wait("a collective", (), tuple(r for r in others if r in gone(ranks)), {})
    if own.said.transfer is not None:
        return _transfer(own.said)
    groups = groups_of(calls)
    pending = [call for call in own.calls if not call.done][:1] if victim.failure is None else own.calls[-1:]
    if not pending or pending[0].group not in groups:
        return Wait("a collective", (), tuple(r for r in others if r in gone(ranks)), {})
    return _in_call(victim.rank, pending[0], groups[pending[0].group], calls, limit_s(victim))


def _in_call(rank: int, call: Call, group: Group, calls: Sequence[RankCalls], limit: float | None) -> Wait:
    """Return a call of a group with the members that did not come to it, or only after its time limit."""
    by_rank = {each.rank: each for each in calls}
    absent, late = [], {}
    for member in group.ranks:
        if member == rank:
            continue
        other = by_rank.get(member)
        own = other.in_group(group.name) if other else {}
        if max(own, default=0) < call.number:
            absent.append(member)
        elif limit and call.number in own and call.began_s and own[call.number].began_s - call.began_s > 0.95 * limit:
            late[member] = own[call.number].began_s - call.began_s
    details = (call.content, "" if group.description == "default_pg" else str(group))
    return Wait(call.title, tuple(filter(None, details)), tuple(absent), late)


def _transfer(said: Collectives) -> Wait:
    assert said.transfer is not None
    how, peer, *_ = said.transfer
    content = RankCalls(said.rank, said).transferred
    return Wait(how, (content,), (peer,) if peer >= 0 else (), {}, peer if peer >= 0 else None)


def _waits_too(rank: RankFacts, calls: Sequence[RankCalls], ranks: Sequence[RankFacts]) -> bool:
    """Return whether a rank that did not come to a call was itself waiting in another, for a rank that was absent."""
    said = next((each.said for each in calls if each.rank == rank.rank), None)
    is_in_one = said is not None and (said.transfer is not None or not all(Call(*call).done for call in said.calls))
    return (is_in_one or is_only_evidence(rank)) and bool(_given_up(rank, calls, ranks).absent)


def _circle(
    seen: Sequence[int], by_rank: Mapping[int, RankCalls], ranks: Sequence[RankFacts], cause: str, culprit: RankFacts
) -> Finding:
    facts = {rank.rank: rank for rank in ranks}
    waits = {rank: _given_up(facts[rank], list(by_rank.values()), ranks) for rank in sorted(seen)}
    each = ", ".join(f"rank {rank} in {wait.in_words}" for rank, wait in waits.items())
    are_groups = len({wait.details[-1:] for wait in waits.values()}) > 1
    hint = f": {SAME_ORDER}" if are_groups else ""
    headline = f"{rank_list(sorted(seen))} waited for each other, {each}{hint}"
    return culprit.rank, headline, _met(culprit, cause), "different_collectives"


def _of_one_kind(absent: Sequence[int], how: Mapping[int, str]) -> list[int]:
    """Return those ranks that one sentence can describe: those that left, or else returned, failed or ended."""
    for kind in ("left", "returned", "failed", "ended"):
        if found := [rank for rank in absent if how.get(rank) == kind]:
            return found
    return []


def _gone_headline(
    blamed: Sequence[int], how: str, victims: Sequence[int], wait: Wait, facts: Mapping[int, RankFacts]
) -> str:
    it = "it" if len(blamed) == 1 else "them"
    who, others = rank_list(list(blamed)), rank_list(list(victims))
    were = "was" if len(victims) == 1 else "were"
    doing = f"{were} still in {wait.in_words} with {it}"
    if wait.peer is not None:
        doing = f"{were} still in {wait.in_words} {'from' if wait.title == 'recv' else 'to'} {it}"
    if how == "left":
        left = facts[blamed[0]].left
        place = f"destroy_process_group at {left.place}" if left and left.place else "destroy_process_group"
        return f"{who} left {'its' if len(blamed) == 1 else 'their'} process group ({place}) while {others} {doing}"
    verb = "ended" if how == "ended" else how
    return f"{who} {verb} while {others} {doing}: every rank must take part in the same collectives"


def _late_headline(
    blamed: Sequence[int],
    limit: float,
    victim: RankFacts,
    wait: Wait,
    by_rank: Mapping[int, RankCalls],
    facts: Mapping[int, RankFacts],
) -> str:
    who = rank_list(list(blamed))
    place = facts[victim.rank].stack.place if facts[victim.rank].stack else by_rank[victim.rank].place
    waited = f"where rank {victim.rank} waited{f' at {place}' if place else ''}"
    if wait.peer is not None:
        verb = "send to" if wait.title == "recv" else "receive from"
        headline = f"{who} did not {verb} rank {victim.rank} within {limit:g} s: {wait.in_words}, {waited}"
    else:
        headline = f"{who} did not come to {wait.in_words} within {limit:g} s, {waited}"
    places = [f"rank {r} {facts[r].stack.in_words}" for r in blamed if facts[r].stack and r not in wait.late]
    came = [f"rank {r} came {wait.late[r]:.1f} s after it" for r in blamed if r in wait.late]
    return "; ".join([headline, *places, *came])
