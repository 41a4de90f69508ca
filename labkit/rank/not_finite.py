"""Ends a rank that logs a NaN or an Inf, in a run that was launched with `watch="nan"`."""

from __future__ import annotations

import math

from labkit.protocol.pages import help_hint


def check(step: int, names: tuple[str, ...], values: list[float]) -> None:
    """Raise FloatingPointError for the first logged value that is not finite."""
    for name, value in zip(names, values, strict=True):
        if not math.isfinite(value):
            raise FloatingPointError(
                f"{name} is {value} at step {step}: the run was launched with watch='nan'\n{help_hint('not_a_number')}"
            )
