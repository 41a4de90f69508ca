"""Of what grows without end, a bounded part: curves in few points, the mean of several, rates over the last seconds."""

from __future__ import annotations

from functools import reduce

import numpy as np
from numpy.typing import NDArray

Points = tuple[NDArray[np.float64], NDArray[np.float64]]
"""Of a curve: x and y."""


class Thinned:
    """A curve of any length in a bounded number of points, which keep every minimum and maximum.

    Consecutive points share a bucket; a bucket is drawn by its lowest and its highest point, and by its first that is
    not finite, which is drawn as a gap. When there are twice `buckets` of them, neighbours merge. Adding n points costs
    O(n + buckets), whatever came before.
    """

    def __init__(self, buckets: int = 250) -> None:
        self._limit = 2 * buckets
        self._size = 1  # points per bucket
        self._count = 0  # points in all
        self._kept = np.empty((3, 0))  # of each how many points came before it, x, y

    def add(self, x: NDArray[np.float64], y: NDArray[np.float64]) -> None:
        """Append points, given as two arrays of equal length."""
        places = np.arange(self._count, self._count + len(x))
        self._count += len(x)
        while self._count >= self._limit * self._size:
            self._size *= 2
        kept = np.concatenate((self._kept, (places, x, y)), axis=1)
        bucket, y = kept[0] // self._size, kept[2]
        first = np.flatnonzero(np.diff(bucket, prepend=-1))
        # What is not finite sorts last, and so is neither lowest nor highest unless its bucket holds nothing else.
        is_gap = ~np.isfinite(y)
        low, high = (np.lexsort((np.where(is_gap, np.inf, by), bucket))[first] for by in (y, -y))
        gaps = np.flatnonzero(is_gap)
        gaps = gaps[np.diff(bucket[gaps], prepend=-1) > 0]
        end = np.arange(len(y))[-1:]  # so that the curve goes as far as it has come; the next points take its place
        self._kept = kept[:, np.unique(np.concatenate((low, high, gaps, end)))]

    def points(self) -> Points:
        """Return x and y of the points to draw, in the order in which they were added."""
        _, x, y = self._kept
        return x, y


class Mean:
    """The mean over ranks at every step that all ranks have logged, as it becomes known."""

    WAITING = 20_000
    """Points that one rank may be ahead of the others before its oldest are left out of the mean."""

    def __init__(self, world_size: int) -> None:
        self.curve = Thinned()
        self._untried = 0
        self._waiting: list[NDArray[np.float64]] = [np.empty((2, 0))] * world_size  # steps and values of each rank

    def add(self, rank: int, x: NDArray[np.float64], y: NDArray[np.float64]) -> None:
        """Take points of one rank."""
        waiting = self._waiting
        waiting[rank] = np.concatenate((waiting[rank], (x, y)), axis=1)[:, -self.WAITING :]
        shared = min(points.shape[1] for points in waiting)
        if not shared:
            return
        together = np.stack([points[:, :shared] for points in waiting])
        if (together[:, 0] == together[0, 0]).all():
            self._waiting = [points[:, shared:] for points in waiting]
        else:
            # Ranks that log different steps: average where they meet, forget what can no longer be met. To look for
            # that is dear, so after a vain attempt only when there is a tenth more to look at.
            self._untried += len(x)
            if self._untried < sum(points.shape[1] for points in waiting) / 10:
                return
            self._untried = 0
            common = reduce(np.intersect1d, [steps for steps, _ in waiting])
            if not len(common):
                return
            at = [np.intersect1d(steps, common, return_indices=True)[1] for steps, _ in waiting]
            together = np.stack([points[:, where] for points, where in zip(waiting, at, strict=True)])
            self._waiting = [points[:, points[0] > common[-1]] for points in waiting]
        with np.errstate(invalid="ignore"):  # inf on one rank and -inf on another
            self.curve.add(together[0, 0], together[:, 1].mean(axis=0))


class Rates:
    """Amounts per second, of each rank, over a sliding window of its own clock."""

    WINDOW_S = 5.0

    def __init__(self, world_size: int) -> None:
        # (time, total) of each rank where the window begins, where the next may begin, and now; NaN before the first.
        self._begin, self._middle, self._now = np.full((3, 2, world_size), np.nan)

    def add(self, ranks: NDArray[np.int32], times_s: NDArray[np.float64], amounts: NDArray[np.float64]) -> None:
        """Take amounts of any ranks, those of each by time; NaN counts as none."""
        amounts, ends_s = np.nan_to_num(amounts), np.full(self._now.shape[1], -np.inf)
        np.maximum.at(ends_s, ranks, times_s)
        is_early = times_s < ends_s[ranks] - self.WINDOW_S  # so that the window can begin there
        for part in (is_early, ~is_early):
            who, first = np.unique(ranks[part], return_index=True)
            is_new = np.isnan(self._now[0, who])
            for mark in (self._begin, self._middle):
                begins = times_s[part][first], amounts[part][first]
                mark[:, who] = np.where(is_new, begins, mark[:, who])
            with np.errstate(over="ignore", invalid="ignore"):  # of amounts that are no real ones
                self._now[1] = np.nan_to_num(self._now[1]) + np.bincount(ranks[part], amounts[part], len(ends_s))
            self._now[0, ranks[part]] = times_s[part]
            moves = self._now[0] - self._middle[0] >= self.WINDOW_S / 2
            self._begin = np.where(moves, self._middle, self._begin)
            self._middle = np.where(moves, self._now, self._middle)

    def per_s(self) -> NDArray[np.float64]:
        """Return the rate of each rank; NaN while there are no two times."""
        (start_s, before), (end_s, after) = self._begin, self._now
        took_s = np.where(end_s > start_s, end_s - start_s, np.nan)
        with np.errstate(over="ignore", invalid="ignore"):
            per_s: NDArray[np.float64] = (after - before) / took_s
        return per_s
