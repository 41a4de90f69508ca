"""What ends a rank that logs a NaN or an Inf."""

from __future__ import annotations

import math

from labkit.protocol.job import RankHooks
from labkit.protocol.pages import help_hint


class EndsAtTheFirst(RankHooks):
    """Has the rank fail at the first logged value that is not finite."""

    def logged(self, step: int, names: tuple[str, ...], values: list[float]) -> None:
        """Raise FloatingPointError for it."""
        for name, value in zip(names, values, strict=True):
            if not math.isfinite(value):
                raise FloatingPointError(
                    f"{name} is {value} at step {step}: the run was launched with watch='nan'\n"
                    + help_hint("not_a_number")
                )
