"""What a run that failed says: the rank to blame, why, and what became of the others.

Which of several ranks that failed was first is said by the plugin `root_cause`; without it, the first that told of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from labkit.protocol import plugins
from labkit.protocol.events import Failure
from labkit.protocol.pages import more
from labkit.protocol.system import OutOfMemory
from labkit.protocol.text import printable

NATIVE_SOURCE = re.compile(r"\[/[^\]]*\] ")
"""Where in a library's C++ an error was raised: of no use in a summary."""


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
    out_of_memory: OutOfMemory = ""
    """Whether the system killed the process because memory had run out."""
    unseen: bool = False
    """Nobody saw the process end; the exit code is a guess."""
    last_step: int | None = None
    """Like what follows, filled in when the run has failed."""
    output_end: str = ""
    """The last lines that the rank printed."""
    crash: str = ""
    """What `faulthandler` wrote there after it, when native code ended the process."""
    stack: Any = None
    """Where the rank stood when it failed, as a plugin has read it from its report or the crash; a short text."""


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

    def printable(self) -> Diagnosis:
        """Return the diagnosis in text that any page and file takes: paths and errors may hold what UTF-8 does not."""
        return self._replace(
            headline=printable(self.headline), cause=printable(self.cause), others=list(map(printable, self.others))
        )


Finding = tuple[int, str, str, str]
"""What says more than that a rank failed: the rank to blame, the headline, the cause, the page in `labkit.errors`."""

Explanation = Callable[[RankFacts, str, list[RankFacts]], Finding | None]
"""Finds that, if it can, for the rank that failed first, its cause, and all ranks."""


def diagnose(ranks: list[RankFacts], explanations: Iterable[Explanation] = ()) -> Diagnosis:
    """Return which rank failed first, why, and what became of the others."""
    found: Diagnosis | None = plugins.first("diagnose", ranks, explanations)
    return found or _first_to_tell(ranks)


def _first_to_tell(ranks: list[RankFacts]) -> Diagnosis:
    reports = {rank.failure.time_s: rank for rank in ranks if rank.failure}
    if reports:
        culprit = reports[min(reports)]
        return Diagnosis(culprit.rank, *reported(culprit), others(ranks, culprit.rank), "rank_failed")
    ended = [rank for rank in ranks if rank.exit_code is not None and not (rank.returned or rank.ended_by_us)]
    culprit = min(ended, key=lambda rank: rank.exit_s)
    headline = f"rank {culprit.rank} died (exit code {culprit.exit_code}) and left no traceback"
    return Diagnosis(culprit.rank, headline, culprit.output_end, others(ranks, culprit.rank), "rank_died")


def reported(culprit: RankFacts) -> tuple[str, str]:
    """Return the headline and the cause of a failure that its rank has reported."""
    failure = culprit.failure
    assert failure is not None
    where = "" if failure.during == "running" else f" while {failure.during}"
    headline = f"rank {culprit.rank} failed{where}: {NATIVE_SOURCE.sub('', failure.summary)}"
    if culprit.last_step is not None:
        headline += f" (after logging step {culprit.last_step})"
    return headline, failure.traceback.rstrip()


def others(ranks: list[RankFacts], blamed: int | None) -> list[str]:
    """Return what became of the other ranks, as far as that is known, in lines."""
    found: list[str] | None = plugins.first("others", ranks, blamed)
    return found or []


def diagnose_silence(silent_s: float, first_silent: int, ranks: list[RankFacts]) -> Diagnosis:
    """Say that a run is ended because it has made no progress. Blames the first to fall silent."""
    headline = f"no rank logged, printed or returned anything for {silent_s:g} s (timeout_s)"
    cause = f"Rank {first_silent} was the first to fall silent. Give a longer timeout_s if such silence is expected."
    return Diagnosis(first_silent, headline, cause, others(ranks, first_silent), "hang")


def diagnose_own_error(error: BaseException, trace: str, folder: str, not_ended: str = "") -> Diagnosis:
    """Say that labkit itself could not go on: no rank is to blame.

    `folder` is the run directory of ranks that go on without the notebook, "" where they have been ended; `not_ended`
    says why they could not be.
    """
    after = "The ranks were ended, for nobody follows them any longer. What had come from them is kept."
    if not_ended:
        after = f"The ranks could not be ended ({not_ended}): `run.pids` are their processes. What had come is kept."
    if folder:
        after = (
            f"The ranks may still be at work. Once the cause is mended, labkit.attach({folder!r}) follows them again."
        )
    headline = f"labkit could not follow the ranks any longer: {type(error).__name__}: {error}"
    return Diagnosis(None, headline.splitlines()[0][:500], f"{after}\n\n{trace}".rstrip(), [], "labkit_failed")
