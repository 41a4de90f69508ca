"""What a comparison takes from the curves that runs have logged."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from labkit.monitor.history import SAMPLES, History, again
from labkit.run import Run

if TYPE_CHECKING:
    import pandas as pd


def mean_curve(history: History, name: str) -> pd.Series:
    """Return the mean of a logged value over the ranks that log it, wherever all of them do, from the whole history.

    By (step, count), in order: the first time that a rank logs a step has count 0, the next time 1. NaN where a rank
    has logged NaN.
    """
    import pandas as pd

    steps, means = history.by_step(name)
    index = pd.MultiIndex.from_arrays([steps, again(steps)], names=["step", "again"])
    return pd.Series(means, index).sort_index()


def curves_apart(one: History, other: History, name: str) -> tuple[float, str]:
    """Return the greatest difference of two mean curves at the steps of both, and what is to be said instead, or "".

    NaN where no step is in both, or a curve is not finite.
    """
    if not all(name in each.names for each in (one, other)):
        return math.nan, ""
    mine, theirs = mean_curve(one, name).align(mean_curve(other, name), join="inner")
    if mine.empty:
        return math.nan, "no step in both"
    apart = (mine - theirs).abs().where(mine != theirs, 0.0)
    lost = apart[~np.isfinite(apart)]
    if lost.empty:
        return float(apart.max()), ""
    return math.nan, f"not finite (from step {lost.index.min()[0]:,})"


def samples_per_s(run: Run, timed_s: Sequence[float] = ()) -> float:
    """Return samples per second over all ranks; NaN without `samples`.

    From the timed steps, in which nothing else was going on, where there are any; else from each rank's first log call
    to its last.
    """
    if SAMPLES not in run.recorded.names:
        return math.nan
    logged = run.history.dropna(subset=SAMPLES).groupby("rank")
    if timed_s:
        return float(logged[SAMPLES].median().sum() / statistics.median(timed_s))
    span_s = logged["time_s"].last() - logged["time_s"].first()
    since = logged[SAMPLES].sum() - logged[SAMPLES].first()
    return float((since / span_s).where(span_s > 0).sum(skipna=False))
