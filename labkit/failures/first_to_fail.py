"""Which rank failed first: the process that died by itself, or the first report that is no consequence of another."""

from __future__ import annotations

from labkit.failures import ledger
from labkit.failures.evidence import limit_s, lost_peer, was_aborted_by_watchdog
from labkit.failures.exit_codes import in_words
from labkit.failures.facts import NATIVE_SOURCE, Diagnosis, Explanation, RankFacts
from labkit.failures.grouping import in_lines
from labkit.failures.known_errors import recognise
from labkit.protocol.text import cut_off

SEEN_LATE_S = 0.25
"""A process may have ended this many seconds before its end was seen."""


# The problem: one rank fails, and within milliseconds the others fail, too, because they wait for it. Which was first?
#
# What does not work: the order in which reports arrive (the victim of a killed process reports first, and nobody
# reports the killed one); the ranks' clocks alone (a death is seen a quarter of a second late); exit codes (a victim's
# is also 1); the words of an error alone (the user's own web request can get a "Connection refused", too).
#
# What is done: a process that ended by itself, inside the function and without a report, is the cause, unless NCCL's
# watchdog aborted it, which it does to victims. Only an ordinary report from well before that death takes precedence.
# Otherwise the cause is the earliest report that is more than evidence: more than torch's own words that another rank
# was not there (`evidence`). If there is only evidence, better explanations are looked for: collectives that do not
# match, a barrier that was missed, and the ledger of ranks that have gone or had not come (`ledger`).
#
# What still fails: two ranks that fail by themselves within a quarter of a second, one of them without a report; and a
# rank that loses its connection for a reason outside of all ranks (a cable). It is blamed, since all ranks were there.


def diagnose(ranks: list[RankFacts], explain: Explanation = ledger.explain) -> Diagnosis:
    """Return which rank failed first, why, and what became of the others.

    Args:
        ranks: What is known of every rank. One at least has failed, by a report or by the end of its process.
        explain: Looks for a better explanation than the rank's own report, in what is known of the ranks' collectives.
    """
    culprit = min(filter(_has_failed, ranks), key=_order)
    own = _reported(culprit) if culprit.failure else _without_report(culprit)
    found = explain(culprit, own.cause, ranks) or own
    return found._replace(others=others(ranks, found.rank))


def _has_failed(rank: RankFacts) -> bool:
    return rank.failure is not None or (rank.exit_code is not None and not (rank.returned or rank.ended_by_us))


def _order(rank: RankFacts) -> tuple[int, float]:
    """Return the sort key of a rank that has failed: causes come before evidence, then the earliest."""
    if rank.failure is None:
        if was_aborted_by_watchdog(rank):
            return 1, rank.exit_s
        return 0, float("inf") if rank.unseen else rank.exit_s - SEEN_LATE_S
    if lost_peer(rank):
        # A rank that gives up after its time limit closes the connections of those that wait for it.
        return 2 if limit_s(rank) is not None else 3, rank.failure.time_s
    return 0, rank.failure.time_s


def _reported(culprit: RankFacts) -> Diagnosis:
    """Return the diagnosis of a failure that the rank itself has reported."""
    failure = culprit.failure
    assert failure is not None
    where = "" if failure.during == "running" else f" while {failure.during}"
    step = "" if culprit.last_step is None else f" (after logging step {culprit.last_step})"
    headline = f"rank {culprit.rank} failed{where}: {NATIVE_SOURCE.sub('', failure.summary)}{step}"
    return Diagnosis(culprit.rank, headline, failure.traceback.rstrip(), [], recognise(culprit) or "rank_failed")


def _without_report(culprit: RankFacts) -> Diagnosis:
    """Return the diagnosis of a process that left nothing but its exit code and its output."""
    assert culprit.exit_code is not None
    who, how = f"rank {culprit.rank}", in_words(culprit.exit_code)
    said, page = f"died ({how}) and left no traceback", recognise(culprit) or "rank_died"
    cause, advice = f"{who} ended with {how}; no Python exception was reported.", ""
    if culprit.unseen:
        said = "disappeared without a report"
        cause = f"Neither {who} nor its launcher has said how it ended. The machine may have crashed or lost its "
        cause += "connection, or all of the job there was killed."
    elif culprit.out_of_memory:
        said, page = f"was killed by the system: out of memory ({how})", "out_of_memory"
        cause = f"{who} ended with {how} because memory had run out: the machine's, or what its container or job may "
        cause += "take."
        advice = " Try a smaller batch or a smaller model."
        if culprit.out_of_memory == "perhaps":
            said = f"was killed ({how}), perhaps because the system was out of memory"
            cause = f"{who} ended with {how} while the system killed processes because memory had run out. It counts "
            cause += "them for the whole machine, so it may have killed another process: dmesg names it."
    if culprit.peak_bytes and "SIGKILL" in how:
        cause += f" Its memory was seen to peak at {culprit.peak_bytes / 2**30:.2f} GiB."
    step = "" if culprit.last_step is None else f", after logging step {culprit.last_step} or later"
    output = ["Its last output:", *culprit.output_end.rstrip().splitlines()[-20:]] if culprit.output_end else []
    known = [cause + advice, str(culprit.stack or culprit.crash.rstrip()), *output]
    return Diagnosis(culprit.rank, f"{who} {said}{step}", "\n".join(filter(None, known)), [], page)


def others(ranks: list[RankFacts], blamed: int | None) -> list[str]:
    """Return what became of the other ranks, a line for each; of many ranks, a line for each outcome."""
    return in_lines({rank.rank: outcome(rank) for rank in ranks if rank.rank != blamed})


def outcome(rank: RankFacts) -> str:
    """Return what became of a rank that is not to blame."""
    if rank.returned:
        return "had returned; its result is kept"
    if rank.failure is not None:
        summary = NATIVE_SOURCE.sub("", rank.failure.summary)
        why = cut_off(summary.partition(". ")[0], 100)
        if lost_peer(rank) and limit_s(rank) is not None:
            return f"gave up waiting as a consequence ({why})"
        if lost_peer(rank):
            return f"lost its connection as a consequence ({why})"
        return f"failed too, {rank.failure.time_s:.2f} s after the launch: {cut_off(summary, 200)}"
    if rank.unseen and rank.last_step is None:
        return "sent no report"
    if rank.ended_by_us:
        step = "" if rank.last_step is None else f" after logging step {rank.last_step}"
        return f"was still running and was ended{step}"
    if was_aborted_by_watchdog(rank):
        return "waited until NCCL's watchdog ended it (SIGABRT)"
    if rank.exit_code is not None:
        return f"died too ({in_words(rank.exit_code)})"
    return "was still running when the run ended"
