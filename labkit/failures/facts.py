"""What is known of each rank, and the diagnosis of a run: the types that the other modules share."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from labkit.failures.missed import RankCalls
from labkit.protocol.events import Failure
from labkit.protocol.pages import help_hint
from labkit.protocol.text import printable
from labkit.system.out_of_memory import OutOfMemory

NATIVE_SOURCE = re.compile(r"\[(?:/|\.\.|[A-Za-z]:)[^\]]*\] ")
"""Where in a library's C++ an error was raised, which does not belong into a summary."""


@dataclass
class RankFacts:
    """What is known of one rank that bears on which rank failed first."""

    rank: int
    failure: Failure | None = None
    """The rank's own report."""
    returned: bool = False
    """Whether the function returned and its result arrived."""
    returned_s: float = float("inf")
    """When it was seen to return, in seconds since the launch."""
    exit_code: int | None = None
    """As in `multiprocessing.Process.exitcode`; None while the process lives."""
    exit_s: float = float("inf")
    """When the end of the process was seen, in seconds since the launch."""
    ended_by_us: bool = False
    """Whether the run ended this rank's process: after another rank had failed, for example."""
    peak_bytes: int = 0
    """The greatest resident memory of the process that was seen."""
    out_of_memory: OutOfMemory = ""
    """Whether the system killed the process because memory ran out."""
    unseen: bool = False
    """Whether nobody saw the process end; the exit code is then a guess."""
    last_step: int | None = None
    """The last step that it logged. Filled in once the run has failed, as are the fields below."""
    output_end: str = ""
    """The last lines that the rank printed."""
    crash: str = ""
    """What `faulthandler` wrote after that, when native code ended the process."""
    left: str = ""
    """The call by which it left its process group while its function went on: "destroy_process_group at …"."""
    called: RankCalls | None = None
    """The collectives that it has called; None if that was not asked."""
    stack: Any = None
    """The `RankStack` of the rank when it failed or crashed; None if it is not known."""


class Diagnosis(NamedTuple):
    """Which rank failed first, why, and what became of the others."""

    rank: int | None
    """The rank to blame, or None."""
    headline: str
    """One line, with the rank."""
    cause: str
    """The rank's own traceback, or what is known if it left none."""
    others: list[str]
    """What became of the other ranks: a line for each, or for several with the same outcome."""
    page: str
    """The name of the help page, as `labkit.explain` takes it."""

    @property
    def what_to_do(self) -> str:
        """The line that names the help page; "" if the cause already names one, as labkit's own errors do."""
        return "" if "labkit.explain(" in self.cause else help_hint(self.page)

    def printable(self) -> Diagnosis:
        """Return the diagnosis in text that can be encoded as UTF-8, which paths and errors may not be."""
        return self._replace(
            headline=printable(self.headline), cause=printable(self.cause), others=list(map(printable, self.others))
        )


Explanation = Callable[[RankFacts, str, list[RankFacts]], Diagnosis | None]
"""Returns a better explanation of a failure, or None, given the rank that seems to have failed first, its cause, and
all ranks. What became of the others is filled in afterwards."""
