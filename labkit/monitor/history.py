"""What the ranks logged: every call kept in columns, and small thinned curves to draw while it grows."""

from __future__ import annotations

import threading
from functools import reduce
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from labkit.protocol.events import Log

if TYPE_CHECKING:
    import pandas as pd
    from numpy.typing import NDArray

SAMPLES = "samples"
"""Logged name that gives samples per second and is drawn nowhere."""

JOINED_CALLS = 50_000
"""Log calls that are kept in one piece at most."""

MEAN = "mean"
"""Label of the curve over all ranks, beside "rank 0", "rank 1", …"""


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


class _Mean:
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
        return np.mean(values, axis=0)


def _sorted(
    points: tuple[NDArray[np.float64], NDArray[np.float64]],
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    order = np.argsort(points[0], kind="stable")
    return points[0][order], points[1][order]


class Progress(NamedTuple):
    """Where one rank stands."""

    steps: int
    """Log calls so far."""
    last_step: int | None
    """Step of the last log call."""
    time_s: float
    """Of the last log call, since the launch; 0 before the first."""
    steps_per_s: float
    """Over the last few seconds of logging."""
    samples_per_s: float
    """The same for the logged `samples`; NaN if the rank does not log them."""
    last: dict[str, float]
    """Last value of every name."""


class NotFinite(NamedTuple):
    """A logged value that is NaN or infinite."""

    step: int
    time_s: float
    """Since the launch."""
    rank: int
    name: str
    value: float

    def __str__(self) -> str:
        what = "NaN" if np.isnan(self.value) else "Inf" if self.value > 0 else "-Inf"
        return f"rank {self.rank} logged {self.name} {what} at step {self.step}"


class _Rate:
    """Amount per second over a sliding window of the ranks' own clock."""

    def __init__(self, window_s: float = 5.0) -> None:
        self._window_s = window_s
        self._marks: list[tuple[float, float]] = []  # (time, total)

    def add(self, times_s: NDArray[np.float64], amounts: NDArray[np.float64]) -> None:
        total = self._marks[-1][1] if self._marks else 0.0
        if not self._marks:
            total = float(np.nan_to_num(amounts[0]))
            self._marks.append((float(times_s[0]), total))
            times_s, amounts = times_s[1:], amounts[1:]
        if len(times_s):
            self._marks.append((float(times_s[-1]), total + float(np.nansum(amounts))))
        while len(self._marks) > 2 and self._marks[-1][0] - self._marks[1][0] > self._window_s:
            self._marks.pop(0)

    def per_s(self) -> float:
        if len(self._marks) < 2 or self._marks[-1][0] <= self._marks[0][0]:
            return float("nan")
        (start, before), (end, after) = self._marks[0], self._marks[-1]
        return (after - before) / (end - start)


class History:
    """Everything the ranks logged. `add` is called by one thread, the rest by any."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.names: list[str] = []
        """Logged names, in the order in which they first came."""
        self.first_not_finite: NotFinite | None = None
        """The NaN or Inf of the earliest step, of those that came at the same step the first; None if there is none."""
        self._batches: list[list[Log]] = [[] for _ in range(world_size)]
        self._curves: dict[tuple[str, int], Thinned] = {}
        self._means: dict[str, _Mean] = {}
        self._steps = [0] * world_size
        self._last_step: list[int | None] = [None] * world_size
        self._last: list[dict[str, float]] = [{} for _ in range(world_size)]
        self._last_time_s = [0.0] * world_size
        self._step_rate = [_Rate() for _ in range(world_size)]
        self._sample_rate = [_Rate() for _ in range(world_size)]
        self._lock = threading.Lock()
        self._frame: tuple[int, pd.DataFrame] | None = None

    def add(self, log: Log) -> None:
        """Take one batch of log calls."""
        steps = np.array(log.steps, dtype=np.float64)
        values = np.array(log.values, dtype=np.float64).reshape(len(steps), len(log.names))
        times_s = np.array(log.times_s)
        rank = log.rank
        with self._lock:
            self._keep(log)
            self._note_not_finite(log, values)
            self._steps[rank] += len(steps)
            self._last_step[rank] = log.steps[-1]
            self._last_time_s[rank] = log.times_s[-1]
            self._step_rate[rank].add(times_s, np.ones(len(steps)))
            for column, name in enumerate(log.names):
                y = values[:, column]
                self._last[rank][name] = float(y[-1])
                if name not in self._means:
                    self.names.append(name)
                    self._means[name] = _Mean(self.world_size)
                    for r in range(self.world_size):
                        self._curves[name, r] = Thinned()
                self._curves[name, rank].add(steps, y)
                if self.world_size > 1:
                    self._means[name].add(rank, steps, y)
                if name == SAMPLES:
                    self._sample_rate[rank].add(times_s, y)

    def _note_not_finite(self, log: Log, values: NDArray[np.float64]) -> None:
        if np.isfinite(values).all():
            return
        call, column = np.argwhere(~np.isfinite(values))[0].tolist()
        value = float(values[call, column])
        found = NotFinite(log.steps[call], log.times_s[call], log.rank, log.names[column], value)
        self.first_not_finite = min(filter(None, (self.first_not_finite, found)), key=lambda each: each[:3])

    def before(self, rank: int, step: int) -> History:
        """Return the history without this rank's log calls from `step` on: it went back there, and takes them again."""
        kept = History(self.world_size)
        with self._lock:
            batches = [log for of_rank in self._batches for log in of_rank]
        for log in batches:
            calls = len(log.steps)
            if log.rank == rank:
                calls = next((i for i, taken in enumerate(log.steps) if taken >= step), calls)
            if calls:
                kept.add(log.calls(0, calls))
        return kept

    def since(self, rank: int, place: tuple[int, int]) -> tuple[list[Log], tuple[int, int]]:
        """Return a rank's log calls from a place on, and the place after them. (0, 0) is the first of all."""
        batch, call = place
        with self._lock:
            new = [log.calls(call if number == 0 else 0) for number, log in enumerate(self._batches[rank][batch:])]
        return new, (batch + len(new) - 1, len(new[-1].steps) + call * (len(new) == 1)) if new else place

    def _keep(self, log: Log) -> None:
        """Keep a batch; small ones are joined, so that a log call costs 16 bytes and 8 more per value."""
        kept = self._batches[log.rank]
        if kept and kept[-1].names == log.names and len(kept[-1].steps) < JOINED_CALLS:
            kept[-1].steps.extend(log.steps)
            kept[-1].times_s.extend(log.times_s)
            kept[-1].values.extend(log.values)
        else:
            kept.append(log.calls(0))

    def curves(self, name: str) -> dict[str, tuple[NDArray[np.float64], NDArray[np.float64]]]:
        """Return thinned (steps, values) of `name` by rank ("rank 0" …), and of their "mean".

        There is a mean only of steps that every rank of the run has logged, and only with several ranks.
        """
        with self._lock:
            drawn = {f"rank {rank}": self._curves[name, rank].points() for rank in range(self.world_size)}
            drawn = {label: points for label, points in drawn.items() if len(points[0])}
            mean = self._means[name].curve.points()
            return {**drawn, MEAN: mean} if len(mean[0]) else drawn

    def mean_curve(self, name: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return thinned (steps, means) of `name` over the ranks that have logged it, at the steps all of them have.

        For a run that is over: in a pipeline, say, only the last stages know the loss.
        """
        with self._lock:
            known = self._means[name].curve.points()
            if len(known[0]):
                return known
            logging = [rank for rank in range(self.world_size) if name in self._last[rank]]
            mean = _Mean(len(logging))
            for place, rank in enumerate(logging):
                for log in self._batches[rank]:
                    if name in log.names:
                        values = np.array(log.values).reshape(len(log.steps), len(log.names))
                        mean.add(place, np.array(log.steps, dtype=np.float64), values[:, log.names.index(name)])
            return mean.curve.points()

    def progress(self, rank: int) -> Progress:
        """Return where a rank stands."""
        with self._lock:
            return Progress(
                self._steps[rank],
                self._last_step[rank],
                self._last_time_s[rank],
                self._step_rate[rank].per_s(),
                self._sample_rate[rank].per_s(),
                dict(self._last[rank]),
            )

    def frame(self) -> pd.DataFrame:
        """Return all log calls as a DataFrame: `rank`, `step`, `time_s`, then a column per name; NaN where not logged.

        Rows are in each rank's own order, rank after rank.
        """
        with self._lock:
            total = sum(self._steps)
            if self._frame is None or self._frame[0] != total:
                self._frame = (total, self._build_frame())
            return self._frame[1].copy()

    def _build_frame(self) -> pd.DataFrame:
        import pandas as pd

        batches = [log for of_rank in self._batches for log in of_rank]
        counts = [len(log.steps) for log in batches]
        columns = {
            "rank": np.repeat(np.array([log.rank for log in batches], dtype=np.int64), counts),
            "step": np.concatenate([np.empty(0, np.int64), *(np.array(log.steps, np.int64) for log in batches)]),
            "time_s": np.concatenate([np.empty(0), *(np.array(log.times_s) for log in batches)]),
        }
        for name in self.names:
            columns[name] = np.full(sum(counts), np.nan)
        start = 0
        for log, count in zip(batches, counts, strict=True):
            values = np.array(log.values).reshape(count, len(log.names))
            for column, name in enumerate(log.names):
                columns[name][start : start + count] = values[:, column]
            start += count
        return pd.DataFrame(columns)
