"""From what the ranks reported, and how they ended, to one readable answer: which rank failed first, and why.

Knows no process: it is given facts, so that every case can be tested without starting any.
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from typing import NamedTuple

from labkit.records import Failure

LOST_PEER = re.compile(
    r"Connection (closed|reset) by peer|Broken pipe|Connection refused|Socket (closed|Timeout)|"
    r"remote process exited|NCCL.*(remote|abort)|Timed out waiting.*(send|recv)|Application timeout",
    re.IGNORECASE,
)
"""How the communication libraries say that another rank has gone."""

NATIVE_SOURCE = re.compile(r"\[/[^\]]*\] ")
"""Where in a library's C++ an error was raised: of no use in a summary."""

SEEN_LATE_S = 0.25
"""A process may have ended this much earlier than its end was seen."""


@dataclass(frozen=True)
class RankFacts:
    """What is known of one rank when a run has failed."""

    rank: int
    failure: Failure | None = None
    """The rank's own report."""
    returned: bool = False
    """The function returned, and its result arrived."""
    exit_code: int | None = None
    """As in `multiprocessing.Process.exitcode`; None while the process lives."""
    exit_s: float = float("inf")
    """When the end of the process was seen, in seconds since the launch."""
    ended_by_us: bool = False
    """The run ended this rank's process after another rank had failed."""
    last_step: int | None = None
    output_end: str = ""
    """The last lines that the rank printed."""


class Verdict(NamedTuple):
    """Which rank failed first, why, and what became of the others."""

    rank: int
    headline: str
    """One line, with the rank."""
    cause: str
    """The rank's own traceback, or what is known where it left none."""
    others: list[str]
    """A line for each other rank."""


def judge(ranks: list[RankFacts]) -> Verdict:
    """Find the rank that failed first.

    A process that ended by itself, in the middle of the function and without a report, is the cause: it cannot be a
    victim, for victims get an error and report it. Only an ordinary report from well before that death comes first.
    Otherwise the cause is the earliest report that is not of a lost connection.
    """
    silent = sorted((r for r in ranks if _died_silently(r)), key=lambda r: r.exit_s)
    reports = sorted((r for r in ranks if r.failure), key=_report_order)
    if silent and not (reports and _reported_before(reports[0], silent[0])):
        culprit = silent[0]
        headline, cause = _without_report(culprit)
    else:
        assert reports, "a run fails by a report or by a silent death"
        culprit = reports[0]
        headline, cause = _with_report(culprit, ranks)
    return Verdict(culprit.rank, headline, cause, [_fate(r) for r in ranks if r is not culprit])


def _died_silently(rank: RankFacts) -> bool:
    return rank.exit_code is not None and not (rank.failure or rank.returned or rank.ended_by_us)


def _reported_before(reporter: RankFacts, silent: RankFacts) -> bool:
    assert reporter.failure is not None
    return not _lost_peer(reporter) and reporter.failure.time_s < silent.exit_s - SEEN_LATE_S


def _report_order(rank: RankFacts) -> tuple[bool, float]:
    assert rank.failure is not None
    return _lost_peer(rank), rank.failure.time_s


def _lost_peer(rank: RankFacts) -> bool:
    return rank.failure is not None and LOST_PEER.search(rank.failure.summary) is not None


def _with_report(culprit: RankFacts, ranks: list[RankFacts]) -> tuple[str, str]:
    failure = culprit.failure
    assert failure is not None
    where = "" if failure.during == "running" else f" while {failure.during}"
    headline = f"rank {culprit.rank} failed{where}: {NATIVE_SOURCE.sub('', failure.summary)}"
    if culprit.last_step is not None:
        headline += f" (after logging step {culprit.last_step})"
    cause = failure.traceback.rstrip()
    returned = [r.rank for r in ranks if r.returned]
    if _lost_peer(culprit) and returned:
        headline = (
            f"{rank_list(returned)} returned while rank {culprit.rank} was still in a collective with "
            f"{'it' if len(returned) == 1 else 'them'}: every rank must take part in the same collectives"
        )
    return headline, cause


def _without_report(culprit: RankFacts) -> tuple[str, str]:
    assert culprit.exit_code is not None
    how = exit_in_words(culprit.exit_code)
    headline = f"rank {culprit.rank} died ({how}) and left no traceback"
    if culprit.last_step is not None:
        headline += f", after logging step {culprit.last_step}"
    hints = {
        -signal.SIGKILL: "SIGKILL comes from outside the process. The system sends it when memory runs out: "
        "look at the system log (dmesg) and try a smaller batch or fewer ranks.",
        -signal.SIGSEGV: "A segmentation fault happens in native code; the rank's output shows where it was.",
        -signal.SIGABRT: "Native code gave up (abort); the rank's output may say why.",
    }
    lines = [f"rank {culprit.rank} ended with {how}; no Python exception was reported."]
    if culprit.exit_code in hints:
        lines.append(hints[culprit.exit_code])
    if culprit.exit_code >= 0:
        lines.append("os._exit(), or native code that calls exit(), ends a process in this way.")
    if culprit.output_end:
        lines += ["Its last output:", culprit.output_end.rstrip()]
    return headline, "\n".join(lines)


def _fate(rank: RankFacts) -> str:
    name = f"rank {rank.rank}"
    if rank.returned:
        return f"{name} had returned; its result is kept"
    if rank.failure is not None:
        summary = NATIVE_SOURCE.sub("", rank.failure.summary)
        if _lost_peer(rank):
            return f"{name} lost its connection as a consequence ({summary:.100})"
        return f"{name} failed too, {rank.failure.time_s:.2f} s after the launch: {summary:.200}"
    if rank.ended_by_us:
        return f"{name} was still running and was ended"
    if rank.exit_code is not None:
        return f"{name} died too ({exit_in_words(rank.exit_code)})"
    return f"{name} was still running when the run ended"


def exit_in_words(code: int) -> str:
    """Say an exit code: "exit code 3", "SIGKILL"."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def rank_list(ranks: list[int]) -> str:
    """Say several ranks: "rank 1", "ranks 0 and 2", "ranks 0, 1 and 3"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
