"""The first value of a run that is NaN or infinite."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from labkit.monitor.history import History


class NotFinite(NamedTuple):
    """A logged value that is NaN or infinite."""

    step: int
    rank: int
    name: str
    value: float

    @property
    def in_words(self) -> str:
        """ "NaN", "Inf" or "-Inf"."""
        return "NaN" if np.isnan(self.value) else "Inf" if self.value > 0 else "-Inf"

    def __str__(self) -> str:
        said = f"rank {self.rank} logged {self.name} {self.in_words} at step {self.step}"
        return f"{said}, the first value that is not finite"


def first(history: History) -> NotFinite | None:
    """Return the NaN or Inf of the earliest step, there of the lowest rank; None if there is none."""
    found = []
    for name in [] if history.is_finite else history.names:
        for rank in range(history.world_size):
            steps, values = history.curve(name, rank)
            bad = np.flatnonzero(~np.isfinite(values))
            if len(bad):
                at = bad[steps[bad].argmin()]
                found.append(NotFinite(int(steps[at]), rank, name, float(values[at])))
    return min(found, key=lambda each: each[:2], default=None)
