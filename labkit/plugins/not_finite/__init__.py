"""The first NaN or Inf that a rank logs: which rank, which value, which step; in every view, and marked in the chart.

`finding` looks for it in what was logged. `watching` has a run end at the first (`watch="nan"`), by its ranks' `hooks`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from labkit.monitor.companion import Asked, Companion
    from labkit.monitor.history import History
    from labkit.plugins.not_finite.finding import NotFinite


def companion(asked: Asked) -> Companion | None:
    """Return what ends a run at the first value that is not finite, if it is to be watched for that."""
    if asked.watch is None:
        return None
    from labkit.plugins.not_finite.watching import Watched

    return Watched()


def remark(history: History) -> NotFinite | None:
    """Return the first value that is not finite, which says so and marks itself in the chart; None if there is none."""
    from labkit.plugins.not_finite import finding

    return finding.first(history)
