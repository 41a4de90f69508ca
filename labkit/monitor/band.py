"""Many ranks' values of one name as a band over the steps, and which of the ranks stand apart from it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

BUCKETS = 400
"""Of consecutive steps, at most: with more steps, neighbours merge."""

FENCE = 3.0
"""A value stands apart from this many heights of the middle half beyond it: Tukey's "far out" (Exploratory Data
Analysis, 1977). Of 1,024 normally distributed values one does once in 350 steps."""

NEWEST = 10
"""A rank stands apart if most of its values do, of all steps, or of the newest one in so many."""

ALIKE = 1e-6
"""Relative difference that is none: of the same number, summed by ranks in another order."""


class Band(NamedTuple):
    """Statistics over ranks, one per bucket of steps: of each rank's newest value there, where most have one."""

    steps: NDArray[np.int64]
    """The last in the bucket."""
    least: NDArray[np.float64]
    """Of all values in the bucket, the newest or not, as `greatest` is: a peak is not lost."""
    lower: NDArray[np.float64]
    """The quarter of the ranks that is lowest is below."""
    mean: NDArray[np.float64]
    upper: NDArray[np.float64]
    greatest: NDArray[np.float64]


class Spread:
    """One name's values of all ranks in buckets of consecutive steps. NaN and Inf count as no value.

    A bucket has the newest value of each rank, and the least and the greatest of all. Adding n values costs O(n), at
    any number of ranks; `band` costs as much as there are ranks for each bucket that has changed.
    """

    def __init__(self, world_size: int) -> None:
        self._size = 1  # steps per bucket
        self._first = 0  # the number of the first bucket; bucket n begins at step n × size
        self._allot(0, world_size)
        self._has = np.zeros(world_size, bool)
        self._is_lost = np.zeros(world_size, bool)  # its last value is NaN or Inf

    def _allot(self, buckets: int, world_size: int) -> None:
        self._newest = np.full((buckets, world_size), np.nan)
        self._least, self._greatest = np.full(buckets, np.inf), np.full(buckets, -np.inf)
        self._steps = np.full(buckets, np.iinfo(np.int64).min)
        self._has_changed = np.ones(buckets, bool)
        # What `_settle` makes of them:
        self._count = np.zeros(buckets, np.int64)
        self._lower, self._mean, self._upper = (np.full(buckets, np.nan) for _ in range(3))
        self._is_out = np.zeros((buckets, world_size), bool)

    def add(self, ranks: NDArray[np.int32], steps: NDArray[np.int64], values: NDArray[np.float64]) -> None:
        """Take values of any ranks, those of each in its own order."""
        self._make_room(int(steps.min()), int(steps.max()))
        at, is_finite = steps // self._size - self._first, np.isfinite(values)
        self._newest[at, ranks] = np.where(is_finite, values, np.nan)  # of several for one place the last stays
        np.minimum.at(self._least, at[is_finite], values[is_finite])
        np.maximum.at(self._greatest, at[is_finite], values[is_finite])
        np.maximum.at(self._steps, at, steps)
        self._has_changed[at] = True
        self._has[ranks], self._is_lost[ranks] = True, ~is_finite

    def _make_room(self, low: int, high: int) -> None:
        """Have a bucket for every step from `low` to `high`, and for those that are there."""
        count, world_size = self._newest.shape
        before, size, first = np.arange(count) + self._first, self._size, self._first
        used = np.flatnonzero(self._steps > np.iinfo(np.int64).min)
        if count and first * size <= low and high < (first + count) * size:
            return
        if len(used):
            low, high = min(low, int(before[used[0]]) * size), max(high, int(self._steps[used[-1]]))
        while high // size - low // size >= BUCKETS:
            size *= 2
        old = self._newest[used], self._least[used], self._greatest[used], self._steps[used]
        at = before[used] * self._size // size - low // size
        self._size, self._first = size, low // size
        # Twice as many as are needed, so that not every step costs a copy.
        self._allot(min(BUCKETS, 2 * (high // size - self._first + 1)), world_size)
        for bucket, row in zip(at.tolist(), old[0], strict=True):  # the older of those that merge first
            self._newest[bucket] = np.where(np.isnan(row), self._newest[bucket], row)
        np.minimum.at(self._least, at, old[1])
        np.maximum.at(self._greatest, at, old[2])
        np.maximum.at(self._steps, at, old[3])

    def _settle(self) -> NDArray[np.int64]:
        """Bring the statistics up to date; return the buckets where most of those ranks that ever log have a value."""
        new = np.flatnonzero(self._has_changed)
        values = self._newest[new]
        ordered = np.sort(values, axis=1)  # NaN comes last
        count = np.isfinite(values).sum(axis=1)
        self._lower[new], self._upper[new] = lower, upper = (
            _quantile(ordered, count, 0.25),
            _quantile(ordered, count, 0.75),
        )
        with np.errstate(over="ignore", invalid="ignore"):
            self._mean[new] = mean = np.nansum(values, axis=1) / np.maximum(count, 1)
            apart = np.maximum(lower[:, None] - values, values - upper[:, None])
            self._is_out[new] = apart > FENCE * _height(lower, mean, upper)[:, None]
        self._count[new] = count
        self._has_changed[:] = False
        return np.flatnonzero(self._count >= max(1, self._has.sum() / 2))

    def band(self) -> Band:
        """Return the band where there are values of most ranks that log."""
        at = self._settle()
        return Band(
            *(each[at] for each in (self._steps, self._least, self._lower, self._mean, self._upper, self._greatest))
        )

    def curve(self, rank: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return steps and values of one rank: its newest value in each bucket."""
        at = np.flatnonzero(np.isfinite(self._newest[:, rank]))
        return self._steps[at], self._newest[at, rank]

    def apart(self) -> dict[int, float]:
        """Return the ranks that stand apart, the farthest first, with how far: in heights of the middle half, mostly.

        Those do of which more than half of the values are beyond `FENCE`, of all or of the newest; and, infinitely
        far, those whose last value is NaN or Inf, where that is not so of most.
        """
        at = self._settle()
        found: set[int] = set()
        for part in (at, at[-max(1, len(at) // NEWEST) :]):
            have = np.isfinite(self._newest[part]).sum(axis=0)
            found |= set(np.flatnonzero(2 * self._is_out[part].sum(axis=0) > have).tolist())
        far = {rank: self._far(rank, at) for rank in found}
        if 2 * self._is_lost.sum() < self._has.sum():
            far |= dict.fromkeys(np.flatnonzero(self._is_lost).tolist(), float("inf"))
        return dict(sorted(far.items(), key=lambda item: (-item[1], item[0])))

    def _far(self, rank: int, at: NDArray[np.int64]) -> float:
        at = at[self._is_out[at, rank]]
        lower, mean, upper, value = self._lower[at], self._mean[at], self._upper[at], self._newest[at, rank]
        return float(np.median(np.maximum(lower - value, value - upper) / _height(lower, mean, upper)))


def _height(lower: NDArray[np.float64], mean: NDArray[np.float64], upper: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the height of the middle half, and a little where ranks have the same number."""
    height: NDArray[np.float64] = upper - lower + ALIKE * np.abs(mean) + np.finfo(np.float64).tiny
    return height


def _quantile(ordered: NDArray[np.float64], count: NDArray[np.int64], share: float) -> NDArray[np.float64]:
    """Return a quantile of the first `count` values of each row, between two of them by the way, as NumPy does."""
    place = share * np.maximum(count - 1, 0)
    below = np.floor(place).astype(np.int64)
    above = np.minimum(below + 1, np.maximum(count - 1, 0))
    rows = np.arange(len(ordered))
    low, high = ordered[rows, below], ordered[rows, above]
    quantile: NDArray[np.float64] = low + (high - low) * (place - below)
    return quantile
