"""Many ranks' values of one name as a band over the steps, and which of the ranks stand apart from it."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

BUCKETS = 400
"""Of consecutive steps, at most: with more steps, neighbours merge."""

FENCE = 3.0
"""A value stands apart from this many heights of the middle half beyond it: Tukey's "far out" (Exploratory Data
Analysis, 1977). Of 1,024 normally distributed values one does about once in 400 steps."""

NEWEST = 10
"""A rank stands apart if most of its values do, of all steps, or of the newest one in so many."""

NEVER = np.iinfo(np.int64).min
"""The last step of a bucket in which nothing is."""

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
        self._has, self._is_lost = np.zeros((2, world_size), bool)  # has any value; its last is NaN or Inf
        self._allot(0, world_size)

    def _allot(self, buckets: int, world_size: int) -> None:
        self._newest = np.full((buckets, world_size), np.nan)
        self._least, self._greatest = np.full(buckets, np.inf), np.full(buckets, -np.inf)
        self._steps = np.full(buckets, NEVER)
        self._has_changed = np.ones(buckets, bool)
        # What `_settle` makes of them; how far a value is from the middle half, in heights of that.
        self._count = np.zeros(buckets, np.int64)
        self._lower, self._mean, self._upper = np.full((3, buckets), np.nan)
        self._far = np.zeros((buckets, world_size), np.float32)

    def add(self, ranks: NDArray[np.int32], steps: NDArray[np.int64], values: NDArray[np.float64]) -> None:
        """Take values of any ranks, those of each in its own order."""
        self._make_room(int(steps.min()), int(steps.max()))
        at, is_finite = steps // self._size - self._first, np.isfinite(values)
        self._newest[at, ranks] = np.where(is_finite, values, np.nan)  # of several for one place the last stays
        self._note(at[is_finite], values[is_finite], values[is_finite], steps[is_finite])
        self._has_changed[at] = True
        self._has[ranks], self._is_lost[ranks] = True, ~is_finite

    def _note(self, at: NDArray[np.int64], least: Any, greatest: Any, steps: Any) -> None:
        np.minimum.at(self._least, at, least)
        np.maximum.at(self._greatest, at, greatest)
        np.maximum.at(self._steps, at, steps)

    def _make_room(self, low: int, high: int) -> None:
        """Have a bucket for every step from `low` to `high`, and for those that are there."""
        count, world_size = self._newest.shape
        if self._first * self._size <= low and high < (self._first + count) * self._size:
            return
        used = np.flatnonzero(self._steps > NEVER)
        begins, size = (used + self._first) * self._size, self._size
        if len(used):
            low, high = min(low, int(begins[0])), max(high, int(self._steps[used[-1]]))
        while high // size - low // size >= BUCKETS:
            size *= 2
        rows, old = self._newest[used], (self._least[used], self._greatest[used], self._steps[used])
        self._size, self._first = size, low // size
        # Twice as many as are needed, so that not every step costs a copy.
        self._allot(min(BUCKETS, 2 * (high // size - self._first + 1)), world_size)
        at = begins // size - self._first
        for bucket, row in zip(at.tolist(), rows, strict=True):  # the older of those that merge first
            self._newest[bucket] = np.where(np.isnan(row), self._newest[bucket], row)
        self._note(at, *old)

    def _settle(self) -> NDArray[np.int64]:
        """Bring the statistics up to date; return the buckets where most of those ranks that ever log have a value."""
        new = np.flatnonzero(self._has_changed & (self._steps > NEVER))
        values = self._newest[new]
        self._count[new], self._has_changed[:] = np.isfinite(values).sum(axis=1), False
        is_there = self._count[new] > 0
        new, values = new[is_there], values[is_there]
        if len(new):
            lower, upper = np.nanquantile(values, [0.25, 0.75], axis=1)
            with np.errstate(over="ignore", invalid="ignore"):
                mean = np.nanmean(values, axis=1)
                height = upper - lower + ALIKE * np.abs(mean) + np.finfo(np.float64).tiny
                far = np.maximum(lower[:, None] - values, values - upper[:, None]) / height[:, None]
                self._far[new] = np.where(far > FENCE, far, 0)
            self._lower[new], self._mean[new], self._upper[new] = lower, mean, upper
        return np.flatnonzero(self._count >= max(1, self._has.sum() / 2))

    def band(self) -> Band:
        """Return the band where there are values of most ranks that log."""
        at = self._settle()
        every: list[Any] = [self._steps, self._least, self._lower, self._mean, self._upper, self._greatest]
        return Band(*(each[at] for each in every))

    def curve(self, rank: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return steps and values of one rank: its newest value in each bucket."""
        at = np.flatnonzero(np.isfinite(self._newest[:, rank]))
        return self._steps[at], self._newest[at, rank]

    def apart(self) -> dict[int, float]:
        """Return the ranks that stand apart, with how far, in heights of the middle half.

        Those do of which more than half of the values are beyond `FENCE`, of all or of the newest; and, infinitely
        far, those whose last value is NaN or Inf, where that is not so of most.
        """
        at = self._settle()
        found: dict[int, float] = {}
        for part in (at, at[-max(1, len(at) // NEWEST) :]):
            have, is_out = np.isfinite(self._newest[part]).sum(axis=0), self._far[part] > 0
            for rank in np.flatnonzero(2 * is_out.sum(axis=0) > have).tolist():
                found[rank] = float(self._far[part, rank].max())
        if 2 * self._is_lost.sum() < self._has.sum():
            found |= dict.fromkeys(np.flatnonzero(self._is_lost).tolist(), np.inf)
        return found
