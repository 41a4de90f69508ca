"""Where every rank stands: `run.stacks()`, and what is said when no rank has been heard of for long.

    question      asks the ranks, of this run, after a failure or at the end of a silence, and waits for their answers
    silence       whether a rank that has not answered would have, if it could
    rank_stacks   from what a rank answered to the reader's own line, and which rank is the odd one out
    hang          what that says of a run that is ended because nothing goes on

A rank answers twice: a signal's handler, below Python, writes its main thread's stack (`labkit.rank.signals`), and its
hooks say what else is known of it; `labkit.plugins.collectives`, in which call it waits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from labkit.monitor.companion import Asked, Companion
    from labkit.monitor.run import Run
    from labkit.plugins.stacks.rank_stacks import Stacks


def companion(asked: Asked) -> Companion:
    """Return what asks the ranks of a run where they stand."""
    from labkit.plugins.stacks.question import Asking

    return Asking()


def stacks(run: Run) -> Stacks:
    """Ask the ranks of a run where they stand, wait while answers may come, and return what has come."""
    from labkit.plugins.stacks.question import asking

    return asking(run).ask_and_wait()
