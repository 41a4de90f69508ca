"""Which rank failed first: the process that died by itself, or the first report that is no consequence of another."""

from __future__ import annotations

import re

from labkit.failures import ledger
from labkit.failures.evidence import limit_s, lost_peer, was_aborted_by_watchdog
from labkit.failures.exit_codes import in_words
from labkit.failures.facts import NATIVE_SOURCE, Diagnosis, Explanation, RankFacts
from labkit.failures.grouping import in_lines
from labkit.failures.known_errors import recognise

CUDA_ERROR = re.compile(r"CUDA error: |CUDA driver|NVIDIA driver|No CUDA GPUs|cuDNN error|CUBLAS_STATUS")
"""How PyTorch reports that a GPU has failed or cannot be used; a full memory is reported otherwise."""

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
    culprit, headline, cause, page = _first_to_fail(ranks)
    found = explain(culprit, cause, ranks) or Diagnosis(culprit.rank, headline, cause, [], page)
    return found._replace(others=others(ranks, found.rank))


def _first_to_fail(ranks: list[RankFacts]) -> tuple[RankFacts, str, str, str]:
    silent = sorted((r for r in ranks if _died_silently(r)), key=lambda r: r.exit_s)
    reports = sorted((r for r in ranks if r.failure), key=_report_order)
    if silent and not (reports and _reported_before(reports[0], silent[0])):
        return silent[0], *_without_report(silent[0])
    aborted = sorted((r for r in ranks if was_aborted_by_watchdog(r)), key=lambda r: r.exit_s)
    if aborted and not (reports and not lost_peer(reports[0])):
        return aborted[0], *_without_report(aborted[0])
    assert reports, "a run fails by a report or by a silent death"
    return reports[0], *reported(reports[0]), _page_of_report(reports[0])


def _page_of_report(culprit: RankFacts) -> str:
    assert culprit.failure is not None
    is_of_gpu = CUDA_ERROR.search(culprit.failure.summary)
    return recognise(culprit) or ("gpu" if is_of_gpu else "rank_failed")


def reported(culprit: RankFacts) -> tuple[str, str]:
    """Return the headline and the cause of a failure that the rank itself has reported."""
    failure = culprit.failure
    assert failure is not None
    where = "" if failure.during == "running" else f" while {failure.during}"
    headline = f"rank {culprit.rank} failed{where}: {NATIVE_SOURCE.sub('', failure.summary)}"
    if culprit.last_step is not None:
        headline += f" (after logging step {culprit.last_step})"
    return headline, failure.traceback.rstrip()


def _died_silently(rank: RankFacts) -> bool:
    is_silent = rank.exit_code is not None and not (rank.failure or rank.returned or rank.ended_by_us)
    return is_silent and not was_aborted_by_watchdog(rank)


def _reported_before(reporter: RankFacts, silent: RankFacts) -> bool:
    assert reporter.failure is not None
    return not lost_peer(reporter) and (silent.unseen or reporter.failure.time_s < silent.exit_s - SEEN_LATE_S)


def _report_order(rank: RankFacts) -> tuple[bool, bool, float]:
    assert rank.failure is not None
    is_evidence = lost_peer(rank)
    # A rank that gives up after its time limit closes the connections of those that wait for it.
    return is_evidence, is_evidence and limit_s(rank) is None, rank.failure.time_s


def _without_report(culprit: RankFacts) -> tuple[str, str, str]:
    assert culprit.exit_code is not None
    how = in_words(culprit.exit_code)
    headline = f"rank {culprit.rank} died ({how}) and left no traceback"
    if culprit.out_of_memory == "perhaps":
        headline = f"rank {culprit.rank} was killed ({how}), perhaps because the system was out of memory"
    elif culprit.out_of_memory:
        headline = f"rank {culprit.rank} was killed by the system: out of memory ({how})"
    if culprit.unseen:
        headline = f"rank {culprit.rank} disappeared without a report"
    if culprit.last_step is not None:
        headline += f", after logging step {culprit.last_step} or later"
    is_peak_known = culprit.peak_bytes and (how == "SIGKILL" or culprit.out_of_memory)
    peak = f" Its memory was seen to peak at {culprit.peak_bytes / 2**30:.2f} GiB." if is_peak_known else ""
    lines = [f"rank {culprit.rank} ended with {how}; no Python exception was reported.{peak}"]
    if culprit.out_of_memory:
        meanwhile = (
            "while the system killed processes because memory had run out. It counts them for the whole machine, so "
            "they may have been others: dmesg names them"
            if culprit.out_of_memory == "perhaps"
            else "because memory had run out: the machine's, or what its container or job may take"
        )
        lines = [f"rank {culprit.rank} ended with {how} {meanwhile}.{peak} Try a smaller batch or a smaller model."]
    elif culprit.unseen:
        lines = [
            f"Neither rank {culprit.rank} nor its launcher has said how it ended. The machine may have "
            "crashed or lost its connection, or all of the job there was killed."
        ]
    if where := str(culprit.stack or culprit.crash.rstrip()):
        lines.append(where)
    if culprit.output_end:
        lines += ["Its last output:", *culprit.output_end.rstrip().splitlines()[-20:]]
    return headline, "\n".join(lines), "out_of_memory" if culprit.out_of_memory else recognise(culprit) or "rank_died"


def others(ranks: list[RankFacts], blamed: int | None) -> list[str]:
    """Return what became of the other ranks, a line for each; of many ranks, a line for each outcome."""
    return in_lines({rank.rank: outcome(rank) for rank in ranks if rank.rank != blamed})


def outcome(rank: RankFacts) -> str:
    """Return what became of a rank that is not to blame."""
    if rank.returned:
        return "had returned; its result is kept"
    if rank.failure is not None:
        summary = NATIVE_SOURCE.sub("", rank.failure.summary)
        if lost_peer(rank) and limit_s(rank) is not None:
            return f"gave up waiting as a consequence ({summary.partition('. ')[0]:.100})"
        if lost_peer(rank):
            return f"lost its connection as a consequence ({summary.partition('. ')[0]:.100})"
        return f"failed too, {rank.failure.time_s:.2f} s after the launch: {summary:.200}"
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
