"""The first NaN or Inf that a rank logs: which rank, which value, which step; in every view, and marked in the chart.

`finding` looks for it in what was logged. What ends a run at the first (`watch="nan"`) is the ranks' own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from labkit.monitor.history import History
    from labkit.not_finite.finding import NotFinite


def remark(history: History) -> NotFinite | None:
    """Return the first value that is not finite, which says so and marks itself in the chart; None if there is none."""
    from labkit.not_finite import finding

    return finding.first(history)
