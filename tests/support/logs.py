"""What arrives of a rank that has logged, without a rank."""

from __future__ import annotations

from array import array

import numpy as np

from labkit.protocol.events import Log


def log(rank, steps, step_s=0.1, times_s=None, **columns):
    """One batch, as a rank sends it; step s is logged at s × step_s seconds, if no times are given."""
    rows = np.column_stack([np.asarray(values, dtype=float) for values in columns.values()])
    times_s = [step * step_s for step in steps] if times_s is None else times_s
    return Log(rank, tuple(columns), array("q", steps), array("d", times_s), array("d", rows.ravel()))
