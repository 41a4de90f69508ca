"""What collectives reveal about a failure: ranks met in different ones, or one was late or absent."""

from __future__ import annotations

import re

from labkit.failures import ledger
from labkit.failures.evidence import is_only_evidence
from labkit.failures.facts import Finding, RankFacts
from labkit.failures.grouping import alike, rank_list
from labkit.failures.missed import RankCalls, differing, groups_of
from labkit.failures.stacks import Stacks

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


def explain(culprit: RankFacts, cause: str, ranks: list[RankFacts], calls: list[RankCalls]) -> Finding | None:
    """Return a better explanation of a failure, if collectives give one.

    Args:
        culprit: The rank that seems to have failed first.
        cause: Its traceback.
        ranks: What is known of every rank.
        calls: The collectives of every rank that has reported them.
    """
    return (
        _met_in_different_collectives(culprit, cause, ranks, calls)
        or _announced_different_collectives(cause, ranks)
        or _came_late(culprit, cause)
        or ledger.explain(culprit, cause, ranks, calls)
    )


def _met_in_different_collectives(
    culprit: RankFacts, cause: str, ranks: list[RankFacts], calls: list[RankCalls]
) -> Finding | None:
    """Return the outlier, and the collectives in which ranks met that do not match."""
    is_told = MISMATCH.search(culprit.failure.summary if culprit.failure else culprit.output_end)
    if not (is_told or _differ_where_it_gave_up(culprit, calls)):
        return None
    if found := _received_another_size(culprit, cause, calls):
        return found
    met = Stacks(r.stack for r in ranks if r.stack and r.stack.place)  # a rank outside the function has not come yet
    blamed, *_ = met.outliers or [culprit.rank]
    if difference := differing(calls):
        blamed, *_ = difference.blamed or [blamed]
        call = f"call #{difference.number} of the {difference.group}"
        headline = (
            f"ranks met in {difference.kind} with tensors of different sizes, {call}: {difference.parts}"
            if difference.kind
            else f"ranks met in different collectives, {call}: {difference.parts}"
        )
    elif len({stack.in_words for stack in met}) > 1:
        headline = f"ranks met in different collectives: {met.in_words}"
    else:
        place = culprit.stack.in_words.partition(" ")[2] if culprit.stack else "in a collective"
        headline = f"ranks met {place} with tensors of different sizes; rank {culprit.rank} noticed"
    others = [str(r.stack) for r in ranks if r.stack and r is not culprit]
    return blamed, headline, "\n\n".join([*others, cause]), "different_collectives"


def _differ_where_it_gave_up(culprit: RankFacts, calls: list[RankCalls]) -> bool:
    """Whether ranks differ in the call in which this one lost another.

    gloo tells one rank alone of a message that is too large. It closes the connection, so the others lose a peer; and
    where it has what it needs for its own call, it returns and says nothing.
    """
    last = next((each.calls[-1] for each in calls if each.rank == culprit.rank and each.calls), None)
    if last is None or not is_only_evidence(culprit) or (difference := differing(calls)) is None:
        return False
    return (str(groups_of(calls).get(last.group)), last.number) == (difference.group, difference.number)


def _received_another_size(culprit: RankFacts, cause: str, calls: list[RankCalls]) -> Finding | None:
    """Return what a rank received from another, if it was more than its tensor holds."""
    sizes = SIZES.search(culprit.failure.summary if culprit.failure else culprit.output_end)
    call = culprit.stack.call.rpartition(".")[2] if culprit.stack else ""
    if sizes is None or call not in ("recv", "irecv", "batch_isend_irecv"):
        return None
    own = next((each for each in calls if each.rank == culprit.rank), None)
    tensor = f"{own.transferred}, " if own and own.transferred else ""
    sender = f" from rank {own.said.transfer[1]}" if own and own.said and own.said.transfer else ""
    headline = (
        f"rank {culprit.rank}'s {call} ({tensor}{int(sizes[2]):,} bytes) at {culprit.stack.place} got "
        f"{int(sizes[1]):,} bytes{sender}: sender and receiver must agree on shape and type"
    )
    return culprit.rank, headline, cause, "different_collectives"


def _announced_different_collectives(cause: str, ranks: list[RankFacts]) -> Finding | None:
    """Blame the fewest ranks among those that were about to call different collectives, as PyTorch compared them."""
    said = [each for r in ranks if r.failure for each in FINGERPRINT.findall(r.failure.summary)]
    found = {(f"{what} #{int(n) + 1}{shape and f' of shape {shape}'}", int(who)) for who, n, what, shape in said}
    groups = sorted(((who, what) for what, who in alike(sorted(found)).items()), key=lambda group: len(group[0]))
    if len(groups) < 2:
        return None
    where = "; ".join(f"{rank_list(group)} in {what}" for group, what in groups)
    return groups[0][0][0], f"ranks met in different collectives: {where}", cause, "different_collectives"


def _came_late(culprit: RankFacts, cause: str) -> Finding | None:
    late = LATE.search(culprit.failure.summary) if culprit.failure else None
    if late is None:
        return None
    blamed = int(late[1])
    return blamed, f"rank {blamed} did not come to monitored_barrier within {int(late[2]) / 1000:g} s", cause, "hang"
