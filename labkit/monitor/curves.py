"""Of what grows without end, a bounded part: curves in few points, the mean of several, rates over the last seconds."""

from __future__ import annotations

from functools import reduce
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class _Point(NamedTuple):
    place: int
    """How many points came before it."""
    x: float
    y: float


class Thinned:
    """A curve of any length in a bounded number of points, which keep every minimum and maximum.

    Consecutive points share a bucket; a bucket is drawn by its lowest and its highest point. When there are twice
    `buckets` of them, neighbours merge. Adding n points costs O(n) whatever came before.
    """

    def __init__(self, buckets: int = 250) -> None:
        self._limit = 2 * buckets
        self._size = 1  # points per bucket
        self._full: list[tuple[_Point, _Point]] = []  # lowest and highest of each
        self._last: tuple[_Point, _Point] | None = None  # of the bucket that is still filling
        self._filled = 0  # points in that bucket
        self._count = 0  # points in all
        self._end: _Point | None = None

    def add(self, x: NDArray[np.float64], y: NDArray[np.float64]) -> None:
        """Append points, given as two arrays of equal length."""
        start = 0
        while start < len(x):
            if self._filled == 0 and len(x) - start >= self._size:
                rows = min((len(x) - start) // self._size, self._limit - len(self._full))
                stop = start + rows * self._size
                self._full += self._extremes(x[start:stop], y[start:stop], self._size)
            else:
                stop = min(len(x), start + self._size - self._filled)
                part = self._extremes(x[start:stop], y[start:stop], stop - start)[0]
                self._last = part if self._last is None else _wider(self._last, part)
                self._filled += stop - start
                if self._filled == self._size:
                    self._full.append(self._last)
                    self._last, self._filled = None, 0
            self._count += stop - start
            start = stop
            if len(self._full) == self._limit:
                self._full = [_wider(a, b) for a, b in zip(self._full[::2], self._full[1::2], strict=True)]
                self._size *= 2
        if len(x):
            self._end = _Point(self._count - 1, float(x[-1]), float(y[-1]))

    def _extremes(self, x: NDArray[np.float64], y: NDArray[np.float64], size: int) -> list[tuple[_Point, _Point]]:
        rows = y.reshape(-1, size)
        starts = np.arange(len(rows)) * size
        # A NaN is neither lowest nor highest unless its bucket holds nothing else.
        low = starts + np.where(np.isnan(rows), np.inf, rows).argmin(axis=1)
        high = starts + np.where(np.isnan(rows), -np.inf, rows).argmax(axis=1)
        lows, highs = (map(_Point, (i + self._count).tolist(), x[i].tolist(), y[i].tolist()) for i in (low, high))
        return list(zip(lows, highs, strict=True))

    def points(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return x and y of the points to draw, in the order in which they were added."""
        buckets = self._full if self._last is None else [*self._full, self._last]
        kept = {point.place: point for bucket in buckets for point in sorted(bucket)}
        if self._end is not None:
            kept[self._end.place] = self._end
        return np.array([p.x for p in kept.values()]), np.array([p.y for p in kept.values()])


def _wider(a: tuple[_Point, _Point], b: tuple[_Point, _Point]) -> tuple[_Point, _Point]:
    """Return the lowest and the highest point of two buckets."""
    low = b[0] if np.isnan(a[0].y) or b[0].y < a[0].y else a[0]
    high = b[1] if np.isnan(a[1].y) or b[1].y > a[1].y else a[1]
    return low, high


class Mean:
    """The mean over ranks at every step that all ranks have logged, as it becomes known."""

    WAITING = 20_000
    """Points that one rank may be ahead of the others before its oldest are left out of the mean."""

    def __init__(self, world_size: int) -> None:
        self.curve = Thinned()
        self._untried = 0
        self._waiting: list[tuple[NDArray[np.float64], NDArray[np.float64]]] = [
            (np.empty(0), np.empty(0)) for _ in range(world_size)
        ]

    def add(self, rank: int, x: NDArray[np.float64], y: NDArray[np.float64]) -> None:
        """Take points of one rank."""
        waiting = self._waiting
        steps, values = np.concatenate((waiting[rank][0], x)), np.concatenate((waiting[rank][1], y))
        waiting[rank] = (steps[-self.WAITING :], values[-self.WAITING :])
        shared = min(len(steps) for steps, _ in waiting)
        if not shared:
            return
        first = waiting[0][0][:shared]
        if all(np.array_equal(steps[:shared], first) for steps, _ in waiting):
            self.curve.add(first, _mean([y[:shared] for _, y in waiting]))
            self._waiting = [(x[shared:], y[shared:]) for x, y in waiting]
            return
        # Ranks that log different steps: average where they meet, forget what can no longer be met. To look for that is
        # dear, so after a vain attempt only when there is a tenth more to look at.
        self._untried += len(x)
        if self._untried < sum(len(steps) for steps, _ in waiting) / 10:
            return
        self._untried = 0
        common = reduce(np.intersect1d, [steps for steps, _ in waiting])
        if len(common):
            found = [y[np.searchsorted(x, common, side="left")] for x, y in map(_sorted, waiting)]
            self.curve.add(common, _mean(found))
            self._waiting = [(x[x > common[-1]], y[x > common[-1]]) for x, y in waiting]


def _mean(values: list[NDArray[np.float64]]) -> NDArray[np.float64]:
    with np.errstate(invalid="ignore"):  # inf on one rank and -inf on another
        mean: NDArray[np.float64] = np.mean(values, axis=0)
    return mean


def _sorted(
    points: tuple[NDArray[np.float64], NDArray[np.float64]],
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    order = np.argsort(points[0], kind="stable")
    return points[0][order], points[1][order]


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
            self._now[1] = np.nan_to_num(self._now[1]) + np.bincount(ranks[part], amounts[part], len(ends_s))
            self._now[0, ranks[part]] = times_s[part]
            moves = self._now[0] - self._middle[0] >= self.WINDOW_S / 2
            self._begin = np.where(moves, self._middle, self._begin)
            self._middle = np.where(moves, self._now, self._middle)

    def per_s(self) -> NDArray[np.float64]:
        """Return the rate of each rank; NaN while there are no two times."""
        (start_s, before), (end_s, after) = self._begin, self._now
        took_s = np.where(end_s > start_s, end_s - start_s, np.nan)
        per_s: NDArray[np.float64] = (after - before) / took_s
        return per_s
