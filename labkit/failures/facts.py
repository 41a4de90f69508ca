"""What is known of each rank of a run, and what is said of one that failed: the types that the other modules share."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from labkit.protocol.events import Failure
from labkit.protocol.pages import help_hint
from labkit.protocol.system import OutOfMemory
from labkit.protocol.text import printable

NATIVE_SOURCE = re.compile(r"\[/[^\]]*\] ")
"""Where in a library's C++ an error was raised: of no use in a summary."""


class Left(NamedTuple):
    """A rank has called `destroy_process_group`."""

    frames: tuple[tuple[str, int, str], ...]
    """(file, line, function) of the call, most recent first."""
    place: str = ""
    """The reader's line: "Cell In[3], line 5"."""


@dataclass
class RankFacts:
    """What is known of one rank, as far as it says who failed first."""

    rank: int
    failure: Failure | None = None
    """The rank's own report."""
    returned: bool = False
    """The function returned, and its result arrived."""
    returned_s: float = float("inf")
    """When that was seen, in seconds since the launch."""
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
    left: Left | None = None
    """How it left its process group while its function went on, if it did."""
    stack: Any = None
    """Where the rank was when it failed, from its report or the crash: a `RankStack`."""


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
    """In `labkit.failures.pages`: what the message means, and what to do."""

    @property
    def what_to_do(self) -> str:
        """The line that names the page; "" where the cause is an error of labkit's own, which has named one."""
        return "" if "labkit.failures.pages." in self.cause else help_hint(self.page)

    def printable(self) -> Diagnosis:
        """Return the diagnosis in text that any page and file takes: paths and errors may hold what UTF-8 does not."""
        return self._replace(
            headline=printable(self.headline), cause=printable(self.cause), others=list(map(printable, self.others))
        )


Finding = tuple[int, str, str, str]
"""What says more than that a rank failed: the rank to blame, the headline, the cause, and the page of that kind."""

Explanation = Callable[[RankFacts, str, list[RankFacts]], Finding | None]
"""Finds that, if it can, for the rank that failed first, its cause, and all ranks."""
