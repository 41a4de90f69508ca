"""A stop that loses nothing: ranks end at a common step, in a grace that follows from the run's own pace.

on each rank                                                          in the notebook
hooks   which log call is the last that every rank can still reach    pace   how long the run's steps take

Without it a rank ends at its next log call, and has the engine's grace to come to it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from labkit.monitor.companion import Asked, Companion
    from labkit.protocol.job import RankHooks


def companion(asked: Asked) -> Companion:
    """Return what knows the pace of a run."""
    from labkit.plugins.stopping.pace import Grace

    return Grace()


def rank_hooks() -> RankHooks:
    """Return what has ranks agree on their last step."""
    from labkit.plugins.stopping.hooks import Agrees

    return Agrees()
