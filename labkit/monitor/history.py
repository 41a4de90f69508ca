"""What the ranks logged: every call kept in columns, and small thinned curves to draw while it grows."""

from __future__ import annotations

import contextlib
import itertools
import threading
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from labkit.monitor.curves import Logged, Mean, Points, Rates, Thinned
from labkit.protocol.events import Log

if TYPE_CHECKING:
    import pandas as pd

SAMPLES = "samples"
"""Logged name that gives samples per second and is drawn nowhere."""

AT_ONCE = 8_192
"""Values that wait to be taken in together, at most: what each would cost by itself is then paid once for all."""

PANELS = 100
"""Names that a chart has panels for, at most: more take seconds to draw, and nobody looks at them."""

FEW = 16
"""Ranks that are drawn and listed one by one, at most. Of more, a chart has the least, mean and greatest value."""

RECENT = 100
"""Log calls for each rank, at most, by which its longest recent step is known."""

SPANS = 400
"""Points of a curve over many ranks, at most: with more steps, neighbours merge."""

MEAN = "mean"
"""Label of the curve over all ranks, beside "rank 0", "rank 1", …"""


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


class _Calls(NamedTuple):
    """Log calls in the order in which they came, by column."""

    ranks: NDArray[np.int32]
    kinds: NDArray[np.int32]
    """Which names each has: a number of `History.kinds`."""
    steps: NDArray[np.int64]
    times_s: NDArray[np.float64]
    values: NDArray[np.float64]
    """Call by call, as many as the call has names."""


Named = tuple[NDArray[np.int64], NDArray[np.float64]]
"""Of one name: which calls have it, and its value in each."""

Kinds = dict[int, tuple[NDArray[np.int64], NDArray[np.float64]]]
"""Of the calls of each kind: which they are, and their values, (calls, names)."""

Place = tuple[int, int]
"""In a history: calls and values before it."""


class History:
    """Everything the ranks logged. `add` is called by one thread, the rest by any.

    To take calls in costs the same at any number of ranks: `add` only puts a batch beside those that wait, and what is
    done with them is done for all together, when somebody asks or `AT_ONCE` wait. It costs as much as there are values,
    however many names they have: curves are drawn of the names that somebody asks for.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._waiting: list[Log] = []
        self._waiting_values = 0
        self._back: dict[int, int] = {}
        """Ranks that have gone back, each to a step."""
        self.sifted = 0
        """How often ranks have gone back."""
        self.kinds: dict[tuple[str, ...], int] = {}
        """By the names that a log call has, the number of its kind."""
        self._widths = array("q")
        """By kind, how many names it has."""
        self._where: dict[str, list[Place]] = defaultdict(list)
        """By name, in which kinds it is, and at which place there."""
        self._lock = threading.Lock()
        self._forget()

    def _forget(self) -> None:
        world_size = self.world_size
        # A log call costs 24 bytes, and 8 more per value.
        self.kept = array("i"), array("i"), array("q"), array("d"), array("d")
        """The columns of `_Calls`, which grow. Hold the lock while you read them: see `settled`."""
        self._names: dict[str, int] = {}
        """By name, in the order in which they first came, its row in `_last` and `_last_call`."""
        self._last, self._last_call = np.zeros((0, world_size)), np.zeros((0, world_size), np.int64)
        """By name and rank the last value, and the number of the call that logged it; -1 if none has."""
        self._rows: dict[int, NDArray[np.int64]] = {}
        """By kind, the rows of its names."""
        self._curves: dict[tuple[str, int], Thinned] = defaultdict(Thinned)
        self._means: dict[str, Mean] = defaultdict(lambda: Mean(world_size))
        self._drawn: dict[str, Place] = {}
        """By name, how far its curves have come."""
        self._steps, self._last_step = np.zeros(world_size, np.int64), np.zeros(world_size, np.int64)
        self._last_time_s = np.zeros(world_size)
        self._step_rates, self._sample_rates = Rates(world_size), Rates(world_size)
        self._frame: tuple[int, pd.DataFrame] | None = None

    # Taking in

    def add(self, log: Log) -> None:
        """Take one batch of log calls. It is kept, not copied."""
        with self._lock:
            self._waiting.append(log)
            self._waiting_values += len(log.values)
            if self._waiting_values >= AT_ONCE:
                self._settle()

    def go_back(self, rank: int, step: int) -> None:
        """Forget this rank's log calls from `step` on: it went back there, and takes them again."""
        with self._lock:
            # What it logged before is taken in first. All ranks go back together, mostly: that is sifted once for all.
            if rank in self._back or any(log.rank == rank for log in self._waiting):
                self._settle()
            self._back[rank] = step

    @contextlib.contextmanager
    def settled(self) -> Iterator[None]:
        """Hold the lock, with nothing waiting."""
        with self._lock:
            self._settle()
            yield

    def _settle(self) -> None:
        if self._back:
            self._sift()
        if self._waiting:
            logs, self._waiting, self._waiting_values = self._waiting, [], 0
            counts = [len(log.steps) for log in logs]
            of_logs = [(log.rank, self._kind(log.names)) for log in logs]
            ranks, kinds = np.repeat(np.array(of_logs, np.int32), counts, axis=0).T
            steps, times_s, values = map(b"".join, zip(*((log[2:]) for log in logs), strict=True))
            of_calls = np.frombuffer(steps, np.int64), np.frombuffer(times_s), np.frombuffer(values)
            self._take(_Calls(ranks, kinds, *of_calls))

    def _kind(self, names: tuple[str, ...]) -> int:
        """Return the number of a kind of log call, which may be new."""
        kind = self.kinds.setdefault(names, len(self.kinds))
        if kind == len(self._widths):
            self._widths.append(len(names))
            for place, name in enumerate(names):
                self._where[name].append((kind, place))
        return kind

    def _sift(self) -> None:
        """Take all calls once more, without those that ranks which have gone back will take again."""
        calls, back, self._back = self._all(), self._back, {}
        stays = np.ones(len(calls.ranks), bool)
        for rank, step in back.items():
            mine = np.flatnonzero(calls.ranks == rank)
            again = calls.steps[mine] >= step
            if again.any():
                stays[mine[again.argmax() :]] = False
        self._forget()
        self.sifted += 1
        ranks, kinds, steps, times_s, values = calls
        values = values[np.repeat(stays, self._width_of(kinds))]
        self._take(_Calls(ranks[stays], kinds[stays], steps[stays], times_s[stays], values))

    def _take(self, calls: _Calls) -> None:
        before = len(self.kept[0])
        columns: Any = zip(self.kept, calls, strict=True)
        for kept, more in columns:
            kept.frombytes(more.tobytes())
        ranks, kinds, steps, times_s, _ = calls
        self._steps += np.bincount(ranks, minlength=self.world_size)
        self._last_step[ranks], self._last_time_s[ranks] = steps, times_s  # the last of each rank stays
        self._step_rates.add(ranks, times_s, np.ones(len(ranks)))
        by_kind = self._by_kind(calls)
        names = list(self.kinds)
        for kind in sorted(by_kind.keys() - self._rows.keys(), key=lambda kind: by_kind[kind][0][0]):
            self._make_rows(kind, names[kind])  # in the order in which they came
        for kind, (at, values) in by_kind.items():
            of_rank, from_the_end = np.unique(ranks[at][::-1], return_index=True)
            last = len(at) - 1 - from_the_end
            place = np.ix_(self._rows[kind], of_rank)
            # A name may be in calls of several kinds: the latest call of all counts.
            call = before + at[last]
            self._last[place] = np.where(call > self._last_call[place], values[last].T, self._last[place])
            self._last_call[place] = np.maximum(call, self._last_call[place])
        if SAMPLES in self._names:
            at, y = self._named(SAMPLES, by_kind)
            self._sample_rates.add(ranks[at], times_s[at], y)

    def _make_rows(self, kind: int, names: tuple[str, ...]) -> None:
        """Have a row for each name of a new kind."""
        self._rows[kind] = np.array([self._names.setdefault(name, len(self._names)) for name in names], np.int64)
        if (more := len(self._names) - len(self._last)) > 0:
            more = max(more, len(self._last))  # twice as many, so that not every new name costs a copy
            self._last = np.concatenate((self._last, np.full((more, self.world_size), np.nan)))
            never = np.full((more, self.world_size), -1, np.int64)
            self._last_call = np.concatenate((self._last_call, never))

    def _width_of(self, kinds: NDArray[np.int32]) -> NDArray[np.int64]:
        """Return how many names each call has."""
        return np.array(self._widths, np.int64)[kinds]

    def _by_kind(self, calls: _Calls) -> Kinds:
        """Return the calls of each kind, in the order of the kinds."""
        if len(calls.kinds) and (calls.kinds == calls.kinds[0]).all():  # so mostly
            return {int(calls.kinds[0]): (np.arange(len(calls.kinds)), calls.values.reshape(len(calls.kinds), -1))}
        widths = self._width_of(calls.kinds)
        starts = np.cumsum(widths) - widths
        order = np.argsort(calls.kinds, kind="stable")
        kinds, first = np.unique(calls.kinds[order], return_index=True)
        parts = zip(kinds.tolist(), np.split(order, first[1:]), strict=True) if len(order) else ()
        return {kind: (at, calls.values[starts[at][:, None] + np.arange(self._widths[kind])]) for kind, at in parts}

    def _named(self, name: str, by_kind: Kinds) -> Named:
        """Return the calls that have a name, in their order, and its values."""
        found = [(by_kind[kind], place) for kind, place in self._where[name] if kind in by_kind]
        if len(found) == 1:
            (at, values), place = found[0]
            return at, values[:, place]
        calls = np.concatenate([np.zeros(0, np.int64), *(at for (at, _), _ in found)])
        y = np.concatenate([np.zeros(0), *(values[:, place] for (_, values), place in found)])
        order = np.argsort(calls)
        return calls[order], y[order]

    def _between(self, start: Place, stop: int) -> _Calls:
        """Return the calls from a place on, up to a number of calls."""
        ranks, kinds, steps, times_s, values = self.kept
        span = slice(start[0], stop)
        # A slice of an array is a copy: it can be looked at as it is, while the array grows.
        ints = np.asarray(ranks[span], np.int32), np.asarray(kinds[span], np.int32), np.asarray(steps[span], np.int64)
        of_values = slice(start[1], start[1] + int(self._width_of(ints[1]).sum()))
        return _Calls(*ints, np.asarray(times_s[span]), np.asarray(values[of_values]))

    def _all(self) -> _Calls:
        return self._between((0, 0), len(self.kept[0]))

    # Drawing

    @property
    def version(self) -> tuple[int, int]:
        """Something that differs whenever there is something new to draw."""
        with self.settled():
            return self.sifted, len(self.kept[0])

    def _bring_up(self, names: Iterable[str]) -> None:
        """Draw what has come of these names since they were last asked for.

        A name that comes late is looked for by itself, up to where the others are.
        """
        total = len(self.kept[0])
        places = {name: self._drawn.get(name, (0, 0)) for name in names if name in self._names}
        while places and (start := min(places.values()))[0] < total:
            calls = self._between(start, min([total, *(place[0] for place in places.values() if place > start)]))
            by_kind, stop = self._by_kind(calls), (start[0] + len(calls.ranks), start[1] + len(calls.values))
            for name in [name for name, place in places.items() if place == start]:
                at, y = self._named(name, by_kind)
                if len(at):
                    self._draw(name, calls.ranks[at], calls.steps[at], y)
                places[name] = self._drawn[name] = stop

    def _draw(self, name: str, ranks: NDArray[np.int32], steps: NDArray[np.int64], y: NDArray[np.float64]) -> None:
        """Take values of one name into its curves."""
        logged = _by_rank(ranks, steps, y)
        for rank, (mine, values) in logged.items():
            self._curves[name, rank].add(mine.astype(np.float64), values)
        if self.world_size > 1:
            self._means[name].add(logged)

    # Giving out

    @property
    def names(self) -> list[str]:
        """Logged names, in the order in which they first came."""
        with self.settled():
            return list(self._names)

    @property
    def charted(self) -> list[str]:
        """The names that a chart has panels for: the first `PANELS`, without `SAMPLES`."""
        return [name for name in self.names if name != SAMPLES][:PANELS]

    def logged(self, name: str) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.float64]]:
        """Return the ranks, steps and values of all calls that have a name, those of each rank in its own order."""
        with self.settled():
            return self._logged(name)

    def _logged(self, name: str) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.float64]]:
        calls = self._all()
        at, y = self._named(name, self._by_kind(calls))
        return calls.ranks[at], calls.steps[at], y

    def curves(self, name: str, ranks: Iterable[int] | None = None) -> dict[str, Points]:
        """Return thinned (steps, values) of `name` by rank ("rank 0" …), of all or of these, and of their "mean".

        There is a mean only of steps that every rank of the run has logged, and only with several ranks.
        """
        ranks = range(self.world_size) if ranks is None else ranks
        with self.settled():
            self._bring_up([name])
            drawn = {f"rank {rank}": points for rank in ranks if len((points := self._points(name, rank))[0])}
            mean = self._mean_points(name)
            return {**drawn, MEAN: mean} if len(mean[0]) else drawn

    def drawn(self) -> list[Curve]:
        """Return the curves of a chart: of each name each rank and then the mean; of many ranks `over_ranks`."""
        names = self.charted
        if self.world_size > FEW:
            return [curve for name in names for curve in self.over_ranks(name)]
        with self.settled():
            self._bring_up(names)
        return [Curve(name, key, x, y) for name in names for key, (x, y) in self.curves(name).items()]

    def over_ranks(self, name: str) -> list[Curve]:
        """Return the least, mean and greatest value of `name` over ranks. NaN and Inf count as no value.

        Steps merge into `SPANS` spans. A span is drawn once half of the ranks that log the name have a value there.
        """
        columns = self.logged(name)
        ranks, steps, y = (column[np.isfinite(columns[2])] for column in columns)
        known = np.unique(steps)
        span = np.searchsorted(known, steps) * SPANS // max(SPANS, len(known))
        count = int(span.max(initial=-1)) + 1
        last = np.full(count, np.iinfo(np.int64).min)
        least, greatest = np.full(count, np.inf), np.full(count, -np.inf)
        np.maximum.at(last, span, steps)
        np.minimum.at(least, span, y)
        np.maximum.at(greatest, span, y)
        with np.errstate(over="ignore", invalid="ignore"):
            mean = np.bincount(span, y, minlength=count) / np.bincount(span, minlength=count)
        who = np.unique(span * self.world_size + ranks) // self.world_size
        at = np.bincount(who, minlength=count) >= len(np.unique(ranks)) / 2
        return [Curve(name, k, last[at], v[at]) for k, v in (("least", least), (MEAN, mean), ("greatest", greatest))]

    def listed(self, states: Sequence[str]) -> list[int]:
        """Return the ranks to list: the first `FEW`, and of the others the first that have failed."""
        failed = [rank for rank, state in enumerate(states) if state == "failed" and rank >= FEW]
        return [*range(min(FEW, self.world_size)), *failed[:FEW]]

    def mean_curve(self, name: str) -> Points:
        """Return thinned (steps, means) of `name` over the ranks that have logged it, at the steps all of them have.

        For a run that is over: in a pipeline, say, only the last stages know the loss.
        """
        with self.settled():
            self._bring_up([name])
            known = self._mean_points(name)
            if len(known[0]) or name not in self._names:
                return known
            logging = np.flatnonzero(self._last_call[self._names[name]] >= 0)
            ranks, steps, y = self._logged(name)
            mean = Mean(len(logging))
            mean.add(_by_rank(np.searchsorted(logging, ranks), steps, y))
            return mean.curve.points()

    def _mean_points(self, name: str) -> Points:
        return self._means[name].curve.points()

    def _points(self, name: str, rank: int) -> Points:
        return self._curves[name, rank].points()

    def progress(self, rank: int) -> Progress:
        """Return where a rank stands."""
        with self.settled():
            has = self._last_call[: len(self._names), rank] >= 0
            last = itertools.compress(zip(self._names, self._last[: len(has), rank].tolist(), strict=True), has)
            return Progress(
                steps := int(self._steps[rank]),
                int(self._last_step[rank]) if steps else None,
                float(self._last_time_s[rank]),
                float(self._step_rates.per_s()[rank]),
                float(self._sample_rates.per_s()[rank]),
                dict(last),
            )

    def longest_step_s(self, began_s: Sequence[float]) -> float:
        """Return the longest recent time between two log calls of a rank, in s; 0 before any.

        The first call comes after all preparation, so its time counts only while there is no second.

        Args:
            began_s: When each rank began, since the launch. What lies before that is no step.
        """
        with self.settled():
            ranks = np.asarray(self.kept[0][-RECENT * self.world_size :])
            times_s = np.asarray(self.kept[3][-RECENT * self.world_size :])
        own = [times_s[(ranks == rank) & (times_s >= began)] for rank, began in enumerate(began_s)]
        steps_s = [float(np.diff(times).max()) for times in own if len(times) > 1]
        first_s = [float(times[0]) - began for times, began in zip(own, began_s, strict=True) if len(times)]
        return max(steps_s or first_s, default=0.0)

    def frame(self) -> pd.DataFrame:
        """Return all log calls as a DataFrame: `rank`, `step`, `time_s`, then a column per name; NaN where not logged.

        Rows are in each rank's own order, rank after rank.
        """
        with self.settled():
            total = len(self.kept[0])
            if self._frame is None or self._frame[0] != total:
                self._frame = (total, self._build_frame())
            return self._frame[1].copy()

    def _build_frame(self) -> pd.DataFrame:
        import pandas as pd

        calls = self._all()
        order = np.argsort(calls.ranks, kind="stable")
        columns: dict[str, Any] = {
            "rank": calls.ranks[order].astype(np.int64),
            "step": calls.steps[order],
            "time_s": calls.times_s[order],
        }
        by_kind = self._by_kind(calls)
        for name in self._names:
            at, y = self._named(name, by_kind)
            column = np.full(len(order), np.nan)
            column[at] = y
            columns[name] = column[order]
        return pd.DataFrame(columns)


def _by_rank(ranks: NDArray[Any], steps: NDArray[np.int64], y: NDArray[np.float64]) -> dict[int, Logged]:
    """Return each rank's own steps and values, by rank."""
    of_ranks = {rank: ranks == rank for rank in np.unique(ranks).tolist()}
    return {rank: (steps[mine], y[mine]) for rank, mine in of_ranks.items()}
