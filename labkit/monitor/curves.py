"""Of what grows without end, a bounded part: curves in few points, the mean of several, rates over the last seconds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
        if not len(x):
            return
        places = np.arange(self._count, self._count + len(x))
        self._count += len(x)
        while self._count >= self._limit * self._size:
            self._size *= 2
        kept = np.concatenate((self._kept, (places, x, y)), axis=1)
        bucket, y = kept[0] // self._size, kept[2]
        first = np.flatnonzero(np.diff(bucket, prepend=-1))
        is_gap, counts = ~np.isfinite(y), np.diff(first, append=len(y))
        found = [is_gap]
        # What is not finite counts as inf: neither lowest nor highest unless its bucket holds nothing else.
        for by in (np.where(is_gap, np.inf, y), np.where(is_gap, np.inf, -y)):
            found.append(by == np.repeat(np.minimum.reduceat(by, first), counts))
        is_kept = np.zeros(len(y), bool)
        is_kept[-1:] = True  # so that the curve goes as far as it has come; the next points take its place
        for at in map(np.flatnonzero, found):
            is_kept[at[np.diff(bucket[at], prepend=-1) > 0]] = True  # the first in each bucket
        self._kept = kept[:, is_kept]

    def points(self) -> Points:
        """Return x and y of the points to draw, in the order in which they were added."""
        _, x, y = self._kept
        return x, y


def points_of(ranks: NDArray[Any], steps: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the points (step, count) at which ranks have logged, in order, and of each log call which point it is.

    The first time that a rank logs a step has count 0, the next time 1: so calls of several ranks are told to belong
    together.
    """
    at, counts = np.arange(len(steps)), np.empty(len(steps), np.int64)
    order = np.lexsort((steps, ranks))  # stable: each rank's calls for a step stay in their order
    counts[order] = at - np.maximum.accumulate(np.where(_begins(ranks[order], steps[order]), at, 0))
    order = np.lexsort((counts, steps))
    pairs, place = np.stack((steps, counts), axis=1)[order], np.empty(len(steps), np.int64)
    is_new = _begins(*pairs.T)
    place[order] = np.cumsum(is_new) - 1
    return pairs[is_new], place


def _begins(*columns: NDArray[Any]) -> NDArray[np.bool_]:
    """Return which rows are other than those before them, by column; the first is."""
    found = np.ones(len(columns[0]), bool)
    found[1:] = np.any([column[1:] != column[:-1] for column in columns], axis=0)
    return found


Logged = tuple[NDArray[np.int64], NDArray[np.float64]]
"""Of one rank, in its own order: steps, and the value at each."""


class Mean:
    """The mean over ranks at every step that all ranks have logged, as it becomes known.

    A step that a rank logs twice meets, the second time, the second time of the others.
    """

    WAITING = 20_000
    """Points that one rank may be ahead of the others before its oldest are left out of the mean."""

    def __init__(self, world_size: int) -> None:
        self.curve = Thinned()
        self._waiting: list[Logged] = [(np.empty(0, np.int64), np.empty(0))] * world_size

    def add(self, new: Mapping[int, Logged]) -> None:
        """Take points of ranks. However many come together, each finds those that it meets among them."""
        waiting = self._waiting
        for rank, points in new.items():
            (steps, y), (more_steps, more) = waiting[rank], points
            waiting[rank] = np.concatenate((steps, more_steps)), np.concatenate((y, more))
        of_ranks = [steps for steps, _ in waiting]
        shared = min(map(len, of_ranks))
        if all(np.array_equal(steps[:shared], of_ranks[0][:shared]) for steps in of_ranks):  # so mostly
            met = [np.arange(shared)] * len(of_ranks)
        else:
            met = _met(of_ranks, [steps for steps, _ in new.values()])
        if len(met[0]):
            with np.errstate(over="ignore", invalid="ignore"):  # inf on one rank and -inf on another
                means = np.mean([y[at] for (_, y), at in zip(waiting, met, strict=True)], axis=0)
            self.curve.add(of_ranks[0][met[0]].astype(np.float64), means)
        # What a rank has logged before a point at which all have met can no longer be met.
        for rank, at in enumerate(met):
            steps, y = waiting[rank]
            first = max(len(steps) - self.WAITING, at.max(initial=-1) + 1)
            waiting[rank] = steps[first:].copy(), y[first:].copy()  # which do not keep the rest


def _met(of_ranks: list[NDArray[np.int64]], new: list[NDArray[np.int64]]) -> list[NDArray[np.int64]]:
    """Return where all ranks meet: for each of them the places of those points, in the order of the first rank's."""
    # Nothing that waited had met. Where ranks share no step at all, much may wait, and is not to be sorted every time.
    steps = np.unique(np.concatenate(new))
    for waiting in of_ranks:
        steps = steps[np.isin(steps, waiting)]
        if not len(steps):
            return [np.empty(0, np.int64)] * len(of_ranks)
    counts = [len(steps) for steps in of_ranks]
    points, which = points_of(np.repeat(np.arange(len(counts)), counts), np.concatenate(of_ranks))
    has_all = np.bincount(which) == len(counts)
    by_rank = np.split(which, np.cumsum(counts)[:-1])
    together, met = by_rank[0][has_all[by_rank[0]]], []
    for which in by_rank:
        places = np.empty(len(points), np.int64)
        places[which] = np.arange(len(which))
        met.append(places[together])
    return met


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
