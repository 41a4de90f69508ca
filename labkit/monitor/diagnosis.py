"""From what the ranks reported, and how they ended, to one readable answer: which rank failed first, and why.

Knows no process: it is given facts, so that every case can be tested without starting any.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from labkit.monitor.grouping import LISTED, alike, rank_list
from labkit.protocol.events import Failure, JobEnded
from labkit.protocol.pages import more
from labkit.protocol.source import is_other_library

LOST_PEER = re.compile(
    r"Connection (closed|reset) by peer|Broken pipe|Connection refused|Socket (closed|Timeout)|"
    r"remote process exited|NCCL.*(remote|abort)|Timed out waiting.*(send|recv)|Application timeout|"
    r"successfully reached monitoredBarrier",
    re.IGNORECASE,
)
"""How the communication libraries say that another rank has gone."""

TORCH_ERROR = re.compile(r"(RuntimeError|torch\.distributed\.\w+)\b")
"""What torch raises. Python's own ConnectionResetError, say, concerns other connections, a DataLoader's."""

MISMATCH = re.compile(r"collective mismatch|size doesn't match expected size|op\.preamble")
"""How gloo says that ranks met in different collectives, or with tensors of different sizes."""

NATIVE_SOURCE = re.compile(r"\[/[^\]]*\] ")
"""Where in a library's C++ an error was raised: of no use in a summary."""

SEEN_LATE_S = 0.25
"""A process may have ended this much earlier than its end was seen."""


@dataclass
class RankFacts:
    """What is known of one rank, as far as it says who failed first."""

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
    """The run ended this rank's process, after another rank had failed, say."""
    peak_bytes: int = 0
    """Peak resident memory of the process, as far as it was seen."""
    out_of_memory: bool = False
    """The system was ending processes for want of memory, and this one was killed."""
    unseen: bool = False
    """Nobody saw the process end; the exit code is a guess."""
    last_step: int | None = None
    """Like what follows, filled in when the run has failed."""
    output_end: str = ""
    """The last lines that the rank printed."""
    crash: str = ""
    """What `faulthandler` wrote there after it, when native code ended the process."""
    stack: Any = None
    """Where the rank stood when it failed, as a wing has read it from its report or the crash; a text of some lines."""


class Diagnosis(NamedTuple):
    """Which rank failed first, why, and what became of the others."""

    rank: int | None
    """None: no rank is to blame."""
    headline: str
    """One line, with the rank."""
    cause: str
    """The rank's own traceback, or what is known where it left none."""
    others: list[str]
    """A line for each other rank, or for several that fared alike."""
    page: str
    """In `labkit.errors`: what the message means, and what to do."""

    @property
    def what_to_do(self) -> str:
        """The line that names the page; "" where the cause is an error of labkit's own, which has named one."""
        return "" if "labkit.errors." in self.cause else more(self.page)


Finding = tuple[int, str, str, str]
"""What says more than that a rank failed: the rank to blame, the headline, the cause, the page in `labkit.errors`."""

Explanation = Callable[[RankFacts, str, list[RankFacts]], Finding | None]
"""Finds that, if it can, for the rank that failed first, its cause, and all ranks."""


# The problem: one rank fails, and within milliseconds the others do too, because they wait for it. Which was first?
#
# What does not work: the order in which reports arrive (a victim of a killed process reports first, for nobody reports
# the killed one); the ranks' clocks alone (a death is seen a quarter of a second late); exit codes (a victim's is 1 as
# well); the words of an error alone (a web request of the reader's own meets "Connection refused" too).
#
# What is done: a process that ended by itself, in the middle of the function and without a report, is the cause: it
# cannot be a victim, for victims get an error and report it. Only an ordinary report from well before that death comes
# first. Otherwise the cause is the earliest report that is not of a lost connection: one that torch raised, in words of
# a communication library. Then whatever says more is asked: collectives that do not fit, a barrier missed, a rank that
# had returned.
#
# What still fails: two ranks that fail by themselves within a quarter of a second, one of them without a report; and a
# rank that loses its connection for a reason outside of all ranks (a cable), which is blamed.


def diagnose(ranks: list[RankFacts], explanations: Iterable[Explanation] = ()) -> Diagnosis:
    """Return which rank failed first, why, and what became of the others.

    What first says more of it than the rank's own report, of the explanations and what is known here, is believed.
    """
    culprit, headline, cause, page = _first_to_fail(ranks)
    blamed = culprit.rank
    for better in (*explanations, returned_early):
        if found := better(culprit, cause, ranks):
            blamed, headline, cause, page = found
            break
    outcomes = {r.rank: _outcome(r) for r in ranks if r.rank != blamed}
    return Diagnosis(blamed, headline, cause, in_lines(outcomes), page)


def _first_to_fail(ranks: list[RankFacts]) -> tuple[RankFacts, str, str, str]:
    silent = sorted((r for r in ranks if _died_silently(r)), key=lambda r: r.exit_s)
    reports = sorted((r for r in ranks if r.failure), key=_report_order)
    if silent and not (reports and _reported_before(reports[0], silent[0])):
        return silent[0], *_without_report(silent[0])
    assert reports, "a run fails by a report or by a silent death"
    return reports[0], *_with_report(reports[0])


def returned_early(
    culprit: RankFacts, cause: str, ranks: list[RankFacts], where: str = "a collective"
) -> Finding | None:
    """Blame the first to return, which is not known to have been wrong, only to be missing where the others meet."""
    returned = [r.rank for r in ranks if r.returned]
    if not (returned and _lost_peer(culprit)):
        return None
    headline = (
        f"{rank_list(returned)} returned while rank {culprit.rank} was still in {where} "
        f"with {'it' if len(returned) == 1 else 'them'}: every rank must take part in the same collectives"
    )
    return returned[0], headline, f"What rank {culprit.rank} met:\n\n{cause}", "returned_early"


def diagnose_silence(silent_s: float, first_silent: int, ranks: list[RankFacts]) -> Diagnosis:
    """Say that a run is ended because it has made no progress. Blames the first to fall silent."""
    headline = f"no rank logged or returned anything for {silent_s:g} s (timeout_s)"
    cause = f"Rank {first_silent} was the first to fall silent. Give a longer timeout_s if such silence is expected."
    outcomes = {r.rank: _outcome(r) for r in ranks if r.rank != first_silent}
    return Diagnosis(first_silent, headline, cause, in_lines(outcomes), "hang")


def diagnose_own_error(error: Exception, trace: str, folder: str) -> Diagnosis:
    """Say that labkit itself could not go on: no rank is to blame.

    `folder` is the run directory of ranks that go on without the notebook, "" where they have been ended.
    """
    after = (
        f"The ranks may still be at work. Once the cause is mended, labkit.attach({folder!r}) follows them again."
        if folder
        else "The ranks were ended, for nobody follows them any longer. What had come from them is kept."
    )
    headline = f"labkit could not follow the ranks any longer: {type(error).__name__}: {error}"
    return Diagnosis(None, headline.splitlines()[0][:500], f"{after}\n\n{trace}".rstrip(), [], "labkit_failed")


def diagnose_ended(ended: JobEnded, ranks: list[RankFacts]) -> Diagnosis:
    """Say that whoever carried the ranks ended them, and how far each had come."""
    rank = ended.rank if ended.rank >= 0 else None
    outcomes = {r.rank: _outcome(r) for r in ranks if r.rank != rank}
    return Diagnosis(rank, ended.headline, ended.cause, in_lines(outcomes), ended.page)


def in_lines(outcomes: Mapping[int, str]) -> list[str]:
    """Return a line for each rank; of many, for those that fared alike, the fewest first, and not more than a few."""
    if len(outcomes) <= LISTED:
        return [f"rank {rank} {outcome}" for rank, outcome in outcomes.items()]
    groups = sorted(alike((what, rank) for rank, what in outcomes.items()).items(), key=lambda group: len(group[1]))
    lines = [f"{rank_list(who)}: {outcome}" for outcome, who in groups]
    more = [f"… and {len(lines) - LISTED:,} more such lines: see run.states and run.failures"] if lines[LISTED:] else []
    return lines[:LISTED] + more


def _died_silently(rank: RankFacts) -> bool:
    return rank.exit_code is not None and not (rank.failure or rank.returned or rank.ended_by_us)


def _reported_before(reporter: RankFacts, silent: RankFacts) -> bool:
    assert reporter.failure is not None
    return not _lost_peer(reporter) and (silent.unseen or reporter.failure.time_s < silent.exit_s - SEEN_LATE_S)


def _report_order(rank: RankFacts) -> tuple[bool, float]:
    assert rank.failure is not None
    return _lost_peer(rank), rank.failure.time_s


def _lost_peer(rank: RankFacts) -> bool:
    """Whether the rank failed because another had gone.

    Words prove nothing alone: a web request of the reader's own meets a "Connection refused" too. So it must be an
    error of torch's, and not raised in another library. What still fails: a library whose C++ raises a
    bare RuntimeError in these words, called by the reader's own line.
    """
    if rank.failure is None or not TORCH_ERROR.match(rank.failure.summary):
        return False
    # The innermost frame is the reader's own where it calls torch's C++: `work.wait()`.
    if rank.failure.frames and is_other_library(rank.failure.frames[0][0]):
        return False
    return LOST_PEER.search(rank.failure.summary) is not None


def _with_report(culprit: RankFacts) -> tuple[str, str, str]:
    failure = culprit.failure
    assert failure is not None
    where = "" if failure.during == "running" else f" while {failure.during}"
    headline = f"rank {culprit.rank} failed{where}: {NATIVE_SOURCE.sub('', failure.summary)}"
    if culprit.last_step is not None:
        headline += f" (after logging step {culprit.last_step})"
    return headline, failure.traceback.rstrip(), "rank_failed"


def _without_report(culprit: RankFacts) -> tuple[str, str, str]:
    assert culprit.exit_code is not None
    how = exit_in_words(culprit.exit_code)
    headline = f"rank {culprit.rank} died ({how}) and left no traceback"
    if culprit.out_of_memory:
        headline = f"rank {culprit.rank} was killed by the system for want of memory ({how})"
    if culprit.unseen:
        headline = f"rank {culprit.rank} vanished without a word"
    if culprit.last_step is not None:
        headline += f", after logging step {culprit.last_step}"
    peak = f"Its memory was seen to peak at {culprit.peak_bytes / 2**30:.2f} GiB. " if culprit.peak_bytes else ""
    hints = {
        "SIGKILL": f"{peak}SIGKILL comes from outside the process. The system's out-of-memory killer sends it when "
        "memory runs out: look at the system log (dmesg) and try a smaller batch or fewer ranks.",
        "SIGSEGV": "A segmentation fault happens in native code, below Python.",
        "SIGABRT": "Native code gave up (abort); the rank's output may say why. Among collectives, the usual reason is "
        "that ranks call different ones, or with tensors of different sizes.",
    }
    lines = [f"rank {culprit.rank} ended with {how}; no Python exception was reported."]
    if culprit.out_of_memory:
        lines = [
            f"rank {culprit.rank} ended with {how} while the system ended processes for want of memory. {peak}"
            "Try a smaller batch, a smaller model or fewer ranks."
        ]
    elif culprit.unseen:
        lines = [
            f"Neither rank {culprit.rank} nor what minds it on its machine has said how it ended. The machine may have "
            "crashed or lost its connection, or all of the job there was killed."
        ]
    elif how in hints:
        lines.append(hints[how])
    if where := str(culprit.stack or culprit.crash.rstrip()):
        lines.append(where)
    if culprit.exit_code >= 0:
        lines.append("os._exit(), or native code that calls exit(), ends a process in this way.")
    if culprit.output_end:
        lines += ["Its last output:", *culprit.output_end.rstrip().splitlines()[-20:]]
    return headline, "\n".join(lines), "out_of_memory" if culprit.out_of_memory else "rank_died"


def _outcome(rank: RankFacts) -> str:
    if rank.returned:
        return "had returned; its result is kept"
    if rank.failure is not None:
        summary = NATIVE_SOURCE.sub("", rank.failure.summary)
        if _lost_peer(rank):
            return f"lost its connection as a consequence ({summary.partition('. ')[0]:.100})"
        return f"failed too, {rank.failure.time_s:.2f} s after the launch: {summary:.200}"
    if rank.unseen and rank.last_step is None:
        return "left no word"
    if rank.ended_by_us:
        step = "" if rank.last_step is None else f" after logging step {rank.last_step}"
        return f"was still running and was ended{step}"
    if rank.exit_code is not None:
        return f"died too ({exit_in_words(rank.exit_code)})"
    return "was still running when the run ended"


def exit_in_words(code: int) -> str:
    """Return an exit code in words: "exit code 3", "SIGKILL", "exit code 137: SIGKILL, as a shell says it"."""
    if code < 0:
        return _signal_name(-code) or f"signal {-code}"
    name = _signal_name(code - 128)
    return f"exit code {code}: {name}, as a shell says it" if name else f"exit code {code}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return ""
