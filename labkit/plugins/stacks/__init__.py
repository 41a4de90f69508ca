"""Where every rank stands: `run.stacks()`, and what is said when no rank has been heard of for long.

    question   asks the ranks, of this run, after a failure or at the end of a silence, and waits for their answers
    hooks      what a rank answers: which collectives it has called

A rank answers twice: a signal's handler, below Python, writes its main thread's stack (`labkit.rank.signals`), and its
hooks say in which call it waits. `labkit.failures` decides what that means.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from labkit.failures.stacks import Stacks
    from labkit.monitor.companion import Asked, Companion
    from labkit.monitor.run import Run
    from labkit.protocol.job import RankHooks


def companion(asked: Asked) -> Companion:
    """Return what asks the ranks of a run where they stand."""
    from labkit.plugins.stacks.question import Asking

    return Asking()


def rank_hooks() -> RankHooks:
    """Return what says which collectives a rank has called."""
    from labkit.plugins.stacks.hooks import SaysCalls

    return SaysCalls()


def stacks(run: Run) -> Stacks:
    """Ask the ranks of a run where they stand, wait while answers may come, and return what has come."""
    from labkit.plugins.stacks.question import asking

    return asking(run).ask_and_wait()
