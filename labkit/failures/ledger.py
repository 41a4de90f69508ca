"""Which rank was missed: the ledger of ends and waits, and what collectives reveal about a failure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from labkit.failures.evidence import is_only_evidence, limit_s, watchdog_call
from labkit.failures.facts import Diagnosis, RankFacts
from labkit.failures.grouping import alike, rank_list
from labkit.failures.known_errors import recognise
from labkit.failures.missed import SILENT, Call, Comparison, Group, RankCalls, Wait
from labkit.failures.stacks import Stacks
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

MISMATCH = re.compile(r"collective mismatch|size doesn't match expected size|op\.preamble")
"""How gloo reports that ranks met in different collectives, or with tensors of different sizes."""

SIZES = re.compile(r"op\.preamble\.length <= op\.nbytes\. (\d+) vs (\d+)")
"""How gloo reports that a message has more bytes than the receiver's tensor."""

FINGERPRINT = re.compile(
    r"Rank (\d+) is running collective: CollectiveFingerPrint\(\w+=(\d+), OpType=(\w+)(?:, TensorShape=(\[[\d, ]*\]))?"
)
"""How a group under TORCH_DISTRIBUTED_DEBUG=DETAIL reports what each of two ranks was about to call, counted from 0."""

LATE = re.compile(r"Ranks? (\d+)[\d, ]* failed to pass monitoredBarrier in (\d+) ms")
"""How rank 0 reports which rank did not come to `dist.monitored_barrier`; the first of several."""


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
        elif rank.left:
            found[rank.rank] = "left"
        elif rank.failure is not None:
            found[rank.rank] = "failed"
        elif rank.exit_code is not None and not rank.ended_by_us:
            found[rank.rank] = "ended"
    return found


# A run that goes on


def stuck(ranks: Sequence[RankFacts]) -> Diagnosis | None:
    """Return the rank that others wait for and that can never come, and the message; None if they may go on."""
    compared, how = Comparison(_called(ranks)), gone(ranks)
    found: dict[int, Wait] = {}
    for own in compared.ranks.values():
        if own.is_blocked and own.rank not in how:
            for wait in compared.waits(own.rank):
                # Nothing tells whether a rank has come to a send or a receive: a message may be on its way.
                never = tuple(r for r in wait.absent if r in how and (wait.call is None or compared.is_known(r)))
                if never:
                    found.setdefault(own.rank, wait._replace(absent=never))
    if not found:
        return None
    wait = found[min(found)]
    victims = sorted(rank for rank, other in found.items() if other._replace(call=wait.call) == wait)
    stood = "\n\n".join(f"rank {rank} {compared.ranks[rank].doing}" for rank in victims)
    cause = (
        f"{rank_list(victims).capitalize()} would have waited indefinitely: no error was reported, for not every "
        f"transport tells a rank that another has gone. Where they waited:\n\n{stood}"
    )
    return _blame_gone(ranks, wait, how, victims, cause)


# A run that has failed


def explain(culprit: RankFacts, cause: str, ranks: Sequence[RankFacts]) -> Diagnosis | None:
    """Return a better explanation of a failure, if collectives give one; else None.

    Args:
        culprit: The rank that seems to have failed first.
        cause: Its traceback.
        ranks: What is known of every rank, its collectives too.
    """
    return (
        _met_in_different_collectives(culprit, cause, ranks)
        or _compared_in_detail(cause, ranks)
        or _missed_a_monitored_barrier(culprit, cause)
        or _was_missed(culprit, cause, ranks)
    )


def _called(ranks: Sequence[RankFacts]) -> list[RankCalls]:
    return [rank.called for rank in ranks if rank.called]


def _met_in_different_collectives(culprit: RankFacts, cause: str, ranks: Sequence[RankFacts]) -> Diagnosis | None:
    """Return the outlier, and the collectives in which ranks met that do not match."""
    said = culprit.failure.summary if culprit.failure else culprit.output_end
    difference = Comparison(_called(ranks)).difference()
    # gloo tells one rank alone of a message that is too large. It closes the connection, so the others lose a peer; and
    # where it has what it needs for its own call, it returns and says nothing.
    last = culprit.called.calls[-1:] if culprit.called and is_only_evidence(culprit) else []
    lost_another_in = [(call.group, call.number) for call in last]
    if not (MISMATCH.search(said) or (difference and difference.at in lost_another_in)):
        return None
    met = Stacks(r.stack for r in ranks if r.stack and r.stack.place)  # a rank outside the function has not come yet
    place = culprit.stack.in_words.partition(" ")[2] if culprit.stack else "in a collective"
    blamed, *_ = (difference.blamed if difference else []) or met.outliers or [culprit.rank]
    if (sizes := SIZES.search(said)) and place.startswith("in recv "):
        blamed = culprit.rank
        headline = f"rank {blamed} got {int(sizes[1]):,} bytes {place}, and its tensor has {int(sizes[2]):,}: "
        headline += "sender and receiver must agree on shape and type"
    elif difference:
        headline = difference.text
    elif len({stack.in_words for stack in met}) > 1:
        headline = f"ranks met in different collectives: {met.in_words}"
    else:
        headline = f"ranks met {place} with tensors of different sizes; rank {blamed} noticed"
    others = [str(r.stack) for r in ranks if r.stack and r is not culprit]
    return Diagnosis(blamed, headline, "\n\n".join([*others, cause]), [], "different_collectives")


def _compared_in_detail(cause: str, ranks: Sequence[RankFacts]) -> Diagnosis | None:
    """Blame the fewest ranks among those that were about to call different collectives, as PyTorch compared them."""
    said = [each for r in ranks if r.failure for each in FINGERPRINT.findall(r.failure.summary)]
    calls = {(f"{what} #{int(n) + 1}{shape and f' of shape {shape}'}", int(rank)) for rank, n, what, shape in said}
    groups = sorted(alike(sorted(calls)).items(), key=lambda group: len(group[1]))
    if len(groups) < 2:
        return None
    where = "; ".join(f"{rank_list(who)} in {what}" for what, who in groups)
    _, fewest = groups[0]
    headline = f"ranks met in different collectives: {where}"
    return Diagnosis(fewest[0], headline, cause, [], "different_collectives")


def _missed_a_monitored_barrier(culprit: RankFacts, cause: str) -> Diagnosis | None:
    late = LATE.search(culprit.failure.summary) if culprit.failure else None
    if late is None:
        return None
    headline = f"rank {late[1]} did not come to monitored_barrier within {int(late[2]) / 1000:g} s"
    return Diagnosis(int(late[1]), headline, cause, [], "hang")


def _was_missed(culprit: RankFacts, cause: str, ranks: Sequence[RankFacts]) -> Diagnosis | None:
    """Return the rank that was not there, if a failure only says that some rank was not: follow who waits for whom."""
    if not is_only_evidence(culprit):
        return None
    known, met = _Waits(ranks), f"What rank {culprit.rank} reported:\n\n{cause}"
    victim, seen = culprit, [culprit.rank]
    while True:
        wait, limit = known.wait_of(victim.rank), limit_s(victim)
        how = gone(ranks, victim.failure.time_s if limit is not None and victim.failure else float("inf"))
        if wait.in_words.startswith(("SEND", "RECV")):  # NCCL names no peer; one that has gone has most likely done it
            wait = wait._replace(absent=tuple(r for r in wait.absent if r not in how) or wait.absent)
        if any(how.get(r) in ("left", "returned") for r in wait.absent):
            return _blame_gone(ranks, wait, how, [victim.rank], met)
        if limit is None:
            return None
        if late := known.late(wait, limit):
            where = [str(stack) for rank in late if (stack := known.facts[rank].stack)]
            at = f" at {place}" if (place := known.compared.ranks[victim.rank].place) else ""
            headline = f"{rank_list([*late])} did not come to {wait.in_words} within {limit:g} s, "
            headline += "; ".join([f"where rank {victim.rank} waited{at}", *filter(None, late.values())])
            return Diagnosis(min(late), headline, "\n\n".join([*where, met]), [], recognise(victim) or "hang")
        if not wait.absent:
            return None
        if wait.absent[0] in seen:
            found = known.compared.not_entered()
            blamed = [*found.blamed, culprit.rank] if found else []
            return Diagnosis(blamed[0], found.text, met, [], "different_collectives") if found else None
        victim = known.facts[wait.absent[0]]
        seen.append(victim.rank)


class _Waits:
    """Who waited for whom when a run failed."""

    def __init__(self, ranks: Sequence[RankFacts]) -> None:
        self.facts = {rank.rank: rank for rank in ranks}
        self.compared = Comparison(_as_they_gave_up(ranks))

    def wait_of(self, rank: int) -> Wait:
        """Return for whom a rank waits, or waited until it gave up: all that have gone, where its call is not known."""
        has_gone = gone([*self.facts.values()]) if is_only_evidence(self.facts[rank]) else {}
        unknown = Wait("a collective", tuple(other for other in has_gone if other != rank))
        return next(iter(self.compared.waits(rank)), unknown)

    def late(self, wait: Wait, limit: float) -> dict[int, str]:
        """Return the ranks that kept others waiting for so many seconds, and what each was doing meanwhile.

        They are those that have not come, unless they wait themselves, or else the one that came last.
        """
        free = {rank: self.facts[rank].stack for rank in wait.absent if not self.wait_of(rank).absent}
        if free or wait.call is None:
            return {rank: f"rank {rank} {stack.in_words}" if stack else "" for rank, stack in free.items()}
        entered = self.compared.entered[wait.call.group, wait.call.number]
        rank, last = max(entered.items(), key=lambda entry: entry[1].began_s)
        after_s = last.began_s - wait.call.began_s
        is_late = wait.call.began_s and after_s > 0.95 * limit
        return {rank: f"rank {rank} came {after_s:.1f} s after it"} if is_late else {}


def _as_they_gave_up(ranks: Sequence[RankFacts]) -> Iterator[RankCalls]:
    """Yield each rank's calls when it gave up: it is in the last one still, though its recorder may say that it ended.

    A rank that NCCL's watchdog has aborted cannot answer any more: the watchdog has written in which call it was.
    """
    groups = Comparison(_called(ranks)).groups
    told = {own.rank: {name for name, *_ in own.said.groups} for own in _called(ranks) if own.said.groups}
    for rank in ranks:
        own = rank.called or RankCalls(rank.rank, Collectives(rank.rank, unknown=SILENT))
        found = watchdog_call(rank)
        if own.calls and is_only_evidence(rank) and all(call.done for call in own.calls):
            *before, last = own.calls
            own = replace(own, said=own.said._replace(calls=(*before, last._replace(done=False))))
        elif found and not own.calls:
            group, description, number, kind = found
            members = tuple(r.rank for r in ranks if r is rank or group in told.get(r.rank, {group}))
            call, known = Call(group, number, kind, (), "", False), groups.get(group)
            own = replace(own, said=Collectives(rank.rank, (call,), (known or Group(group, description, members),)))
        yield own


def _blame_gone(
    ranks: Sequence[RankFacts], wait: Wait, how: Mapping[int, str], victims: list[int], cause: str
) -> Diagnosis:
    """Blame those that can never come: of several those that left, or else returned, failed or ended."""
    kind = min((how[rank] for rank in wait.absent if rank in how), key=GONE.index)
    blamed = [rank for rank in wait.absent if how.get(rank) == kind]
    (left,) = {rank.left for rank in ranks if rank.rank == blamed[0]}
    verb = f"left the process group ({left})" if kind == "left" else kind
    were, them = "was" if len(victims) == 1 else "were", "it" if len(blamed) == 1 else "them"
    headline = (
        f"{rank_list(blamed)} {verb} while {rank_list(victims)} {were} still in {wait.in_words} with {them}: "
        "every rank must take part in the same collectives"
    )
    return Diagnosis(blamed[0], headline, cause, [], "returned_early")
