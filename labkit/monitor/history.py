"""What the ranks logged: every call of every rank, in plain columns. Curves are made when somebody draws them."""

from __future__ import annotations

import math
import threading
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from labkit.protocol.events import Log

if TYPE_CHECKING:
    import pandas as pd

SAMPLES = "samples"
"""Logged name that gives samples per second and is drawn nowhere."""

PANELS = 100
"""Names that a chart has panels for, at most: more take seconds to draw, and nobody looks at them."""

FEW = 16
"""Ranks that are drawn and listed one by one, at most. Of more, a chart has the least, mean and greatest value."""

RECENT = 100
"""Log calls of each rank by which its longest recent step is known."""

WINDOW_S = 5.0
"""Rates are those of the last seconds."""

BUCKETS = 250
"""A long curve is drawn in so many parts, at least; each by its lowest and its highest point."""

MEAN = "mean"
"""Label of the curve over all ranks, beside "rank 0", "rank 1", …"""

Points = tuple[NDArray[Any], NDArray[np.float64]]
"""Of a curve: steps and values."""


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


class Curve(NamedTuple):
    """One curve of the chart of what was logged."""

    name: str
    """What was logged: its panel."""
    key: str
    """The same whenever it is drawn again, and its label: "rank 3", "mean"; of many ranks "least", "greatest"."""
    x: Any
    y: Any


class _Calls:
    """The log calls of one rank, in order."""

    def __init__(self) -> None:
        self.steps, self.times_s = array("q"), array("d")
        self.values: dict[str, tuple[array[int], array[float]]] = {}
        """By name, which calls have it, and the value in each."""

    def curve(self, name: str) -> Points:
        at, values = self.values.get(name, ((), ()))
        steps = np.array(self.steps, np.int64)
        return steps if len(at) == len(steps) else steps[np.array(at, np.int64)], np.array(values, np.float64)


class History:
    """Everything the ranks logged. `add` is called by one thread, the rest by any."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.version = 0
        """Another number whenever there is something new to draw."""
        self.is_finite = True
        """Whether no NaN or Inf has ever come."""
        self._of_ranks = [_Calls() for _ in range(world_size)]
        self._names: dict[str, None] = {}
        self._lock = threading.Lock()

    # Taking in

    def add(self, log: Log) -> None:
        """Take one batch of log calls."""
        with self._lock:
            self.version += 1
            self.is_finite = self.is_finite and bool(np.isfinite(log.values).all())
            calls, width = self._of_ranks[log.rank], len(log.names)
            numbers = array("q", range(len(calls.steps), len(calls.steps) + len(log.steps)))
            calls.steps.extend(log.steps)
            calls.times_s.extend(log.times_s)
            for place, name in enumerate(log.names):
                self._names.setdefault(name)
                at, values = calls.values.setdefault(name, (array("q"), array("d")))
                at.extend(numbers)
                values.extend(log.values[place::width])

    def go_back(self, rank: int, step: int) -> None:
        """Forget this rank's log calls from `step` on: it went back there, and takes them again."""
        with self._lock:
            self.version += 1
            calls = self._of_ranks[rank]
            first = next((at for at, each in enumerate(calls.steps) if each >= step), len(calls.steps))
            del calls.steps[first:], calls.times_s[first:]
            for name, (at, values) in list(calls.values.items()):
                kept = bisect_left(at, first)
                del at[kept:], values[kept:]
                if not kept:
                    del calls.values[name]
            left = set().union(*(calls.values for calls in self._of_ranks))
            self._names = {name: None for name in self._names if name in left}

    # Giving out

    @property
    def names(self) -> list[str]:
        """Logged names, in the order in which they first came."""
        with self._lock:
            return list(self._names)

    def curve(self, name: str, rank: int) -> Points:
        """Return the steps and values of a name on one rank, in the order in which they were logged."""
        with self._lock:
            return self._of_ranks[rank].curve(name)

    def by_step(self, name: str) -> Points:
        """Return steps, and the mean of a name there over the ranks that log it, where all of them do.

        The first time that a rank logs a step belongs to the others' first time, its second to their second, and so on.
        NaN where one of them logged NaN.
        """
        curves = [points for rank in range(self.world_size) if len((points := self.curve(name, rank))[0])]
        if not curves:
            return np.empty(0, np.int64), np.empty(0)
        shared = min(len(steps) for steps, _ in curves)
        steps, table = curves[0][0][:shared], np.array([y[:shared] for _, y in curves])
        if not all(np.array_equal(each[:shared], steps) for each, _ in curves):  # seldom
            import pandas as pd

            columns = [pd.Series(y, [each, again(each)]) for each, y in curves]
            together = pd.concat(columns, axis=1, join="inner")
            steps, table = together.index.get_level_values(0).to_numpy(), together.to_numpy().T
        with np.errstate(over="ignore", invalid="ignore"):  # inf on one rank and -inf on another
            return steps, table.mean(axis=0)

    def mean_curve(self, name: str) -> Points:
        """Return `by_step` in few points: of a run that is over, because in a pipeline only the last stages log."""
        return thinned(*self.by_step(name))

    def curves(self, name: str) -> dict[str, Points]:
        """Return the curves of `name` to draw: of each rank that logs it ("rank 0" …), and their "mean".

        There is a mean only of steps that every rank of the run has logged, and only with several ranks.
        """
        curves = {f"rank {rank}": thinned(*self.curve(name, rank)) for rank in range(self.world_size)}
        drawn = {label: points for label, points in curves.items() if len(points[0])}
        if len(drawn) == self.world_size > 1 and len((mean := self.mean_curve(name))[0]):
            drawn[MEAN] = mean
        return drawn

    def over_ranks(self, name: str) -> dict[str, Points]:
        """Return the least, mean and greatest value over many ranks, where half of those that log the name have one.

        Steps are in order. NaN and Inf count as no value.
        """
        import pandas as pd

        columns = [pd.Series(y, steps) for steps, y in (self.curve(name, rank) for rank in range(self.world_size))]
        columns = [column[~column.index.duplicated(keep="last")] for column in columns if len(column)]
        table = pd.concat(columns or [pd.Series(dtype=float)], axis=1).sort_index()
        table = table.where(np.isfinite(table))
        table = table[table.notna().sum(axis=1) >= max(1, len(columns) / 2)]
        with np.errstate(over="ignore"):  # as of values whose sum is no finite number
            found = {"least": table.min(axis=1), MEAN: table.mean(axis=1), "greatest": table.max(axis=1)}
        return {label: thinned(each.index.to_numpy(), each.to_numpy()) for label, each in found.items()}

    def drawn(self) -> list[Curve]:
        """Return the curves of a chart: of each name each rank and then the mean; of many ranks `over_ranks`."""
        curves = self.curves if self.world_size <= FEW else self.over_ranks
        names = [name for name in self.names if name != SAMPLES][:PANELS]
        return [Curve(name, key, *points) for name in names for key, points in curves(name).items()]

    def listed(self, states: Sequence[str]) -> list[int]:
        """Return the ranks to list: the first `FEW`, and of the others the first that have failed."""
        failed = [rank for rank, state in enumerate(states) if state == "failed" and rank >= FEW]
        return [*range(min(FEW, self.world_size)), *failed[:FEW]]

    def progress(self, rank: int) -> Progress:
        """Return where a rank stands."""
        with self._lock:
            calls = self._of_ranks[rank]
            if not calls.steps:
                return Progress(0, None, 0.0, math.nan, math.nan, {})
            count, now_s = len(calls.steps), calls.times_s[-1]
            first = bisect_left(calls.times_s, now_s - WINDOW_S)
            took_s = now_s - calls.times_s[first] or math.nan
            samples_per_s = math.nan
            if SAMPLES in calls.values:
                at, samples = calls.values[SAMPLES]
                samples_per_s = sum(samples[bisect_left(at, first + 1) :]) / took_s
            last = {name: calls.values[name][1][-1] for name in self._names if name in calls.values}
            return Progress(count, calls.steps[-1], now_s, (count - 1 - first) / took_s, samples_per_s, last)

    def longest_step_s(self, began_s: Sequence[float]) -> float:
        """Return the longest recent time between two log calls of a rank, in s; 0 before any.

        The first call comes after all preparation, so its time counts only while there is no second.

        Args:
            began_s: When each rank began, since the launch. What lies before that is no step.
        """
        with self._lock:
            recent = [np.array(calls.times_s[-RECENT:]) for calls in self._of_ranks]
        own = [times_s[times_s >= began] for times_s, began in zip(recent, began_s, strict=True)]
        steps_s = [float(np.diff(times_s).max()) for times_s in own if len(times_s) > 1]
        first_s = [float(times_s[0]) - began for times_s, began in zip(own, began_s, strict=True) if len(times_s)]
        return max(steps_s or first_s, default=0.0)

    def frame(self) -> pd.DataFrame:
        """Return all log calls as a DataFrame: `rank`, `step`, `time_s`, then a column per name; NaN where not logged.

        Rows are in each rank's own order, rank after rank.
        """
        import pandas as pd

        with self._lock:
            counts = [len(calls.steps) for calls in self._of_ranks]
            columns: dict[str, Any] = {
                "rank": np.repeat(np.arange(self.world_size), counts),
                "step": np.concatenate([np.array(calls.steps, np.int64) for calls in self._of_ranks]),
                "time_s": np.concatenate([np.array(calls.times_s, np.float64) for calls in self._of_ranks]),
            }
            for name in self._names:
                columns[name] = np.full(sum(counts), np.nan)
            for first, calls in zip(np.cumsum([0, *counts]), self._of_ranks, strict=False):
                for name, (at, values) in calls.values.items():
                    columns[name][first + np.array(at, np.int64)] = values
        return pd.DataFrame(columns)


def thinned(x: NDArray[Any], y: NDArray[np.float64]) -> Points:
    """Return a curve in few points, in their order, which keep every minimum and maximum, and the end.

    Consecutive points share a bucket, which is drawn by its lowest and its highest, and by its first that is not
    finite, which is drawn as a gap. Buckets hold 1, 2, 4, 8 … points: so a curve that grows is mostly drawn as before.
    """
    if len(y) < 2 * BUCKETS:
        return x, y
    size = 2 ** math.ceil(math.log2(len(y) / (2 * BUCKETS)))
    rows = np.pad(y, (0, -len(y) % size), constant_values=y[-1]).reshape(-1, size)
    starts, is_gap = np.arange(len(rows)) * size, ~np.isfinite(rows)
    low, high = np.where(is_gap, np.inf, rows).argmin(axis=1), np.where(is_gap, -np.inf, rows).argmax(axis=1)
    gap = (starts + is_gap.argmax(axis=1))[is_gap.any(axis=1)]
    at = np.unique(np.concatenate([starts + low, starts + high, gap, [len(y) - 1]]).clip(max=len(y) - 1))
    return x[at], y[at]


def again(steps: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return how often each step came before."""
    order = np.argsort(steps, kind="stable")
    begins = np.diff(steps[order], prepend=steps[order][:1]) != 0
    at, counts = np.arange(len(steps)), np.empty(len(steps), np.int64)
    counts[order] = at - np.maximum.accumulate(np.where(begins, at, 0))
    return counts
