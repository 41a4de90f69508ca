"""Who can no longer be met, and who is to blame where ranks waited for one that was not there.

Knows no process: it is given what is known of every rank, so that every case can be tested without starting any.
"""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from labkit.failures.evidence import is_only_evidence, limit_s, watchdog_call
from labkit.failures.facts import Finding, RankFacts
from labkit.failures.grouping import rank_list
from labkit.failures.missed import SAME_ORDER, Call, Group, RankCalls, groups_of
from labkit.protocol.events import Log
from labkit.rank.recorder import Collectives

# The problem: one rank is not where the others wait for it, and the others are all that is heard of. gloo over TCP
# tells them of a peer that has gone; its libuv transport (macOS, Windows) and NCCL do not. A time limit is reported by
# the rank that waited. NCCL's watchdog even ends that rank.
#
# What does not work: to believe what a transport reports, or to wait for a report.
#
# What is done: labkit has its own channel to every rank, so it keeps who has returned, failed, ended or left its
# process group, and asks the others in which call they are. A rank that waits in a call of a group, to which a member
# that has gone has not come, waits for ever: `stuck`. A rank that reports only that somebody was not there is a victim,
# and the members that have gone, else those that had not come to its call in time, are to blame: `explain`.
#
# What still fails: calls that no recorder has (`isend`, `irecv`; gloo before PyTorch 2.15) are known by stacks alone; a
# rank under torchrun or SLURM is ended by its launcher before it can be asked where it is.

QUIET_S, QUIET_STEPS = 2.0, 4
"""Ranks are asked where they are once they have logged and printed nothing for so long, and so many median steps …"""

CONFIRM_S = 0.5
"""… and once more so much later, before anything is decided: a message may have been on its way."""

ASK_AGAIN = 2.0
"""Those that turn out to be at work are asked again after so many times the silence of the last question."""

RECENT = 33
"""Steps of each rank by which the median one is known."""


class Wait(NamedTuple):
    """What a rank waits in, or was in when it gave up."""

    title: str
    """ "barrier #2", "recv"."""
    details: tuple[str, ...]
    """ "float32 [4]"; the group, unless it is the default one."""
    absent: tuple[int, ...]
    """Who has not come to it; one that has gone, or that could still come."""
    late: Mapping[int, float]
    """Who came too late, by how many seconds after the first."""
    peer: int | None = None
    """The one rank that it sends to or receives from."""

    @property
    def in_words(self) -> str:
        """ "barrier #2 (group of ranks 0 and 1)"."""
        return f"{self.title} ({', '.join(self.details)})" if self.details else self.title


def gone(ranks: Sequence[RankFacts], by_s: float = float("inf")) -> dict[int, str]:
    """Return the ranks that no other can meet any more: "left", "returned", "failed" or "ended".

    One that returned after `by_s`, in seconds since the launch, could still be met by then.
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


class Quiet:
    """Who has logged and printed nothing for long, and when to ask. Times are of one clock, in s."""

    def __init__(self) -> None:
        self._heard_s: dict[int, float] = {}
        self._logged_s: dict[int, float] = {}
        self._steps_s: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=RECENT))
        self._asked: tuple[frozenset[int], float] = frozenset(), 0.0
        """Who had gone when the ranks were last asked, and how long the quietest had been quiet."""

    def hear(self, rank: int, now_s: float) -> None:
        """Note that a rank has begun, or printed."""
        self._heard_s[rank] = now_s

    def take(self, log: Log, now_s: float) -> None:
        """Note that a rank has logged."""
        self.hear(log.rank, now_s)
        for at_s in log.times_s[-RECENT - 1 :]:
            if (before_s := self._logged_s.get(log.rank)) is not None:
                self._steps_s[log.rank].append(at_s - before_s)
            self._logged_s[log.rank] = at_s

    def patience_s(self, rank: int) -> float:
        """Return how long this rank may log and print nothing."""
        steps_s = self._steps_s[rank]
        return max(QUIET_S, QUIET_STEPS * statistics.median(steps_s) if steps_s else 0.0)

    def is_due(self, at_work: set[int], gone: set[int], now_s: float) -> bool:
        """Whether ranks are to be asked where they are: one has gone, and one that has not is quiet. Asks once.

        A rank that was at work may come to wait later, so they are asked again, more and more seldom.
        """
        silent_s = {rank: now_s - self._heard_s.get(rank, now_s) for rank in at_work}
        quiet_s = [for_s for rank, for_s in silent_s.items() if for_s >= self.patience_s(rank)]
        if not gone or not quiet_s:
            self._asked = frozenset(), 0.0
            return False
        before, before_s = self._asked
        if before == gone and before_s <= max(quiet_s) < ASK_AGAIN * before_s:
            return False
        self._asked = frozenset(gone), max(quiet_s)
        return True


def stuck(ranks: Sequence[RankFacts], calls: Sequence[RankCalls]) -> Finding | None:
    """Return whom ranks wait for that can never come, as a run is ended for it; None if any of them may go on."""
    how = gone(ranks)
    by_rank = {each.rank: each for each in calls}
    is_everyone_blocked = all(by_rank[r.rank].is_blocked for r in ranks if r.rank not in how and r.rank in by_rank)
    found: list[tuple[int, Wait]] = []
    for rank in ranks:
        own = by_rank.get(rank.rank)
        if own is None or rank.rank in how or not own.is_blocked:
            continue
        for wait in _waits(own, calls, is_everyone_blocked):
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
        f"{rank_list(victims).capitalize()} would have waited for ever: no error was reported, for not every transport "
        f"tells a rank that another has gone. Where they waited:\n\n{stood}"
    )
    return blamed[0], headline, cause, "returned_early"


def _waits(own: RankCalls, calls: Sequence[RankCalls], is_everyone_blocked: bool) -> list[Wait]:
    """Return what blocks a rank: each call that has not ended, or the rank that it sends to or receives from.

    Absent are those that are known not to have come. Where nothing records calls, one that has returned may have come
    to this one, and only others may be missed: unless all of them wait.
    """
    if own.said is not None and own.said.transfer is not None:
        return [_transfer(own.said)]
    groups = groups_of(calls)
    pending = [call for call in own.calls if not call.done and call.group in groups]
    if pending or own.said is None or own.is_known:
        unknown = {each.rank for each in calls if not each.is_known}
        waits = [_in_call(own.rank, call, groups[call.group], calls, None) for call in pending]
        return [wait._replace(absent=tuple(rank for rank in wait.absent if rank not in unknown)) for wait in waits]
    if len(groups) == 1 and is_everyone_blocked:
        (group,) = groups.values()
        return [Wait("a collective", (), tuple(rank for rank in group.ranks if rank != own.rank), {})]
    return []


# A run that has failed


def explain(
    culprit: RankFacts, cause: str, ranks: Sequence[RankFacts], calls: Sequence[RankCalls] = ()
) -> Finding | None:
    """Return who was not there, where a failure only says that somebody was not."""
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
        missing = _of_one_kind([r for r in absent if how.get(r) in ("left", "returned")], how)
        if missing:
            return (
                missing[0],
                _gone_headline(missing, how[missing[0]], [victim.rank], wait, facts),
                _met(victim, cause),
                "returned_early",
            )
        if limit is None:
            return None
        free = [r for r in absent if not _waits_too(facts[r], list(by_rank.values()), ranks)]
        if blamed := free or sorted(wait.late, key=lambda r: -wait.late[r])[:1]:
            return (
                blamed[0],
                _late_headline(blamed, limit, victim, wait, by_rank, facts),
                _met(victim, cause, [facts[r] for r in blamed]),
                "hang",
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
    """Add what NCCL's watchdog wrote of ranks that it has ended, which can say no more."""
    by_rank = {each.rank: each for each in calls}
    every = [rank.rank for rank in ranks]
    for rank in ranks:
        found = watchdog_call(rank)
        before = by_rank.get(rank.rank)
        if found is None or (before is not None and before.calls):
            continue
        group, description, number, kind = found
        known = groups_of(calls).get(group) or Group(group, description, tuple(every))
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
    """Return who of a group has not come to a call, or after its time limit."""
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
    """Whether a rank that has not come to a call waited in another itself, for a rank that was not there."""
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
    """Return those of whom one sentence can be said: who left, else who returned, failed, ended."""
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
