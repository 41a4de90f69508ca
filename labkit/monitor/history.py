"""What the ranks logged: every call kept in columns, and small thinned curves to draw while it grows."""

from __future__ import annotations

import contextlib
import threading
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from labkit.monitor.curves import Mean, Points, Rates, Thinned
from labkit.protocol.events import Log

if TYPE_CHECKING:
    import pandas as pd

SAMPLES = "samples"
"""Logged name that gives samples per second and is drawn nowhere."""

AT_ONCE = 8_192
"""Log calls that wait to be taken in together, at most: what each would cost by itself is then paid once for all."""

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
    """The same whenever it is drawn again: "rank 3", "mean", an edge of a band, "slot 2"."""
    label: str
    """In the legend; "" leaves it out there."""
    x: Any
    y: Any
    look: Mapping[str, Any] = {}
    """As `plotly.graph_objects.Scatter` takes it, for what is no rank's curve, and no mean: the edge of a band, say."""


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


class History:
    """Everything the ranks logged. `add` is called by one thread, the rest by any.

    To take calls in costs the same at any number of ranks: `add` only puts a batch beside those that wait, and what is
    done with them is done for all together, when somebody asks or `AT_ONCE` wait.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._waiting: list[Log] = []
        self._waiting_calls = 0
        self._back: dict[int, int] = {}
        """Ranks that have gone back, each to a step."""
        self.sifted = 0
        """How often ranks have gone back."""
        self.kinds: dict[tuple[str, ...], int] = {}
        """By the names that a log call has, the number of its kind."""
        self._lock = threading.Lock()
        self._forget()

    def _forget(self) -> None:
        world_size = self.world_size
        # A log call costs 24 bytes, and 8 more per value.
        self.kept = array("i"), array("i"), array("q"), array("d"), array("d")
        """The columns of `_Calls`, which grow; whoever reads them holds the lock: see `settled`."""
        self._names: list[str] = []
        self._curves: dict[tuple[str, int], Thinned] = defaultdict(Thinned)
        self._means: dict[str, Mean] = defaultdict(lambda: Mean(world_size))
        self._steps, self._last_step = np.zeros(world_size, np.int64), np.zeros(world_size, np.int64)
        self._last_time_s = np.zeros(world_size)
        self._last: dict[str, NDArray[np.float64]] = {}
        self._has: dict[str, NDArray[np.bool_]] = {}
        self._step_rates, self._sample_rates = Rates(world_size), Rates(world_size)
        self._frame: tuple[int, pd.DataFrame] | None = None

    # Taking in

    def add(self, log: Log) -> None:
        """Take one batch of log calls. It is kept, not copied."""
        with self._lock:
            self._waiting.append(log)
            self._waiting_calls += len(log.steps)
            if self._waiting_calls >= AT_ONCE:
                self._settle()

    def go_back(self, rank: int, step: int) -> None:
        """Forget this rank's log calls from `step` on: it went back there, and takes them again."""
        with self._lock:
            # All ranks go back together, mostly: what they had logged is sifted once for all of them.
            if not self._back or rank in self._back:
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
            logs, self._waiting, self._waiting_calls = self._waiting, [], 0
            counts = [len(log.steps) for log in logs]
            of_logs = [(log.rank, self.kinds.setdefault(log.names, len(self.kinds))) for log in logs]
            ranks, kinds = np.repeat(np.array(of_logs, np.int32), counts, axis=0).T
            steps, times_s, values = map(b"".join, zip(*((log[2:]) for log in logs), strict=True))
            of_calls = np.frombuffer(steps, np.int64), np.frombuffer(times_s), np.frombuffer(values)
            self._take(_Calls(ranks, kinds, *of_calls))

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
        values = values[np.repeat(stays, self._widths(calls))]
        self._take(_Calls(ranks[stays], kinds[stays], steps[stays], times_s[stays], values))

    def _take(self, calls: _Calls) -> None:
        columns: Any = zip(self.kept, calls, strict=True)
        for kept, more in columns:
            kept.frombytes(more.tobytes())
        ranks, _, steps, times_s, _ = calls
        self._steps += np.bincount(ranks, minlength=self.world_size)
        self._last_step[ranks], self._last_time_s[ranks] = steps, times_s  # the last of each rank stays
        self._step_rates.add(ranks, times_s, np.ones(len(ranks)))
        for name, (at, y) in self._by_name(calls).items():
            if name not in self._last:
                self._names.append(name)
                self._last[name], self._has[name] = np.full(self.world_size, np.nan), np.zeros(self.world_size, bool)
            self._last[name][ranks[at]], self._has[name][ranks[at]] = y, True
            if name == SAMPLES:
                self._sample_rates.add(ranks[at], times_s[at], y)
            self._draw(name, ranks[at], steps[at], y)

    def _draw(self, name: str, ranks: NDArray[np.int32], steps: NDArray[np.int64], y: NDArray[np.float64]) -> None:
        """Take values of one name into its curves."""
        for rank in np.unique(ranks).tolist():
            mine = ranks == rank
            points = steps[mine].astype(np.float64), y[mine]
            self._curves[name, rank].add(*points)
            if self.world_size > 1:
                self._means[name].add(rank, *points)

    def _widths(self, calls: _Calls) -> NDArray[np.int64]:
        """Return how many names each call has."""
        return np.array([len(names) for names in self.kinds], np.int64)[calls.kinds]

    def _all(self) -> _Calls:
        return _Calls(*(np.array(column) for column in self.kept))

    def _by_name(self, calls: _Calls) -> dict[str, Named]:
        found: dict[str, Named] = {}
        starts = np.cumsum(widths := self._widths(calls)) - widths
        for name in dict.fromkeys(name for names in self.kinds for name in names):
            column = np.array([names.index(name) if name in names else -1 for names in self.kinds])[calls.kinds]
            if len(at := np.flatnonzero(column >= 0)):
                found[name] = at, calls.values[starts[at] + column[at]]
        return found

    # Giving out

    @property
    def names(self) -> list[str]:
        """Logged names, in the order in which they first came."""
        with self.settled():
            return self._names

    def curves(self, name: str, ranks: Iterable[int] | None = None) -> dict[str, Points]:
        """Return thinned (steps, values) of `name` by rank ("rank 0" …), of all or of these, and of their "mean".

        There is a mean only of steps that every rank of the run has logged (of many ranks, most of those that log the
        name), and only with several ranks.
        """
        ranks = range(self.world_size) if ranks is None else ranks
        with self.settled():
            drawn = {f"rank {rank}": points for rank in ranks if len((points := self._points(name, rank))[0])}
            mean = self._mean_points(name)
            return {**drawn, MEAN: mean} if len(mean[0]) else drawn

    def drawn(self, asked: Sequence[int] = ()) -> list[Curve]:
        """Return the curves of a chart: of each name each rank and then the mean. `asked` are ranks to be shown."""
        names = [name for name in list(self.names) if name != SAMPLES]
        return [Curve(name, key, key, x, y) for name in names for key, (x, y) in self.curves(name).items()]

    def listed(self, states: Sequence[str], asked: Sequence[int] = ()) -> dict[int, str]:
        """Return the ranks to list, each with why, or ""; of few ranks all. `asked` are ranks to be shown."""
        return dict.fromkeys(range(self.world_size), "")

    def headline(self, states: Sequence[str]) -> str:
        """Return what is said of all ranks, in one line; "" for nothing: they are listed."""
        return ""

    def mean_curve(self, name: str) -> Points:
        """Return thinned (steps, means) of `name` over the ranks that have logged it, at the steps all of them have.

        For a run that is over: in a pipeline, say, only the last stages know the loss.
        """
        with self.settled():
            known = self._mean_points(name)
            if len(known[0]):
                return known
            logging = np.flatnonzero(self._has[name])
            mean = Mean(len(logging))
            calls = self._all()
            at, y = self._by_name(calls)[name]
            for place, rank in enumerate(logging):
                mine = calls.ranks[at] == rank
                mean.add(place, calls.steps[at][mine].astype(np.float64), y[mine])
            return mean.curve.points()

    def _mean_points(self, name: str) -> Points:
        return self._means[name].curve.points()

    def _points(self, name: str, rank: int) -> Points:
        return self._curves[name, rank].points()

    def progress(self, rank: int) -> Progress:
        """Return where a rank stands."""
        with self.settled():
            return Progress(
                steps := int(self._steps[rank]),
                int(self._last_step[rank]) if steps else None,
                float(self._last_time_s[rank]),
                float(self._step_rates.per_s()[rank]),
                float(self._sample_rates.per_s()[rank]),
                {name: float(last[rank]) for name, last in self._last.items() if self._has[name][rank]},
            )

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
        for name, (at, y) in self._by_name(calls).items():
            column = np.full(len(order), np.nan)
            column[at] = y
            columns[name] = column[order]
        return pd.DataFrame(columns)
