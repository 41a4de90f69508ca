"""What the ranks logged: every call kept in columns, and small thinned curves to draw while it grows."""

from __future__ import annotations

import contextlib
import itertools
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
"""Values that wait to be taken in together, at most: what each would cost by itself is then paid once for all."""

PANELS = 100
"""Names that a chart has panels for, at most: more take seconds to draw, and nobody looks at them."""

FEW = 16
"""Ranks that are drawn, listed and averaged one by one, at most; of more, see `large_world`."""

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


class LoggedValue(NamedTuple):
    """One logged value."""

    rank: int
    step: int
    time_s: float
    """Since the launch."""
    name: str
    value: float


class Place(NamedTuple):
    """A place in a history: `History.since` returns what came after it."""

    sifted: int = 0
    """How often ranks had gone back."""
    values: int = 0


class NotFinite(NamedTuple):
    """A logged value that is NaN or infinite."""

    step: int
    time_s: float
    """Since the launch."""
    rank: int
    name: str
    value: float

    @property
    def in_words(self) -> str:
        """ "NaN", "Inf" or "-Inf"."""
        return "NaN" if np.isnan(self.value) else "Inf" if self.value > 0 else "-Inf"

    @property
    def said(self) -> str:
        """In one line: which rank logged it, and at which step."""
        return f"{self}, the first value that is not finite"

    def __str__(self) -> str:
        return f"rank {self.rank} logged {self.name} {self.in_words} at step {self.step}"


class _Calls(NamedTuple):
    """Log calls in the order in which they came, by column."""

    ranks: NDArray[np.int32]
    steps: NDArray[np.int64]
    times_s: NDArray[np.float64]


class _Values(NamedTuple):
    """Values, call by call, by column."""

    calls: NDArray[np.int32]
    """Which call each is of."""
    names: NDArray[np.int32]
    """By number."""
    values: NDArray[np.float64]


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
        self._numbers: dict[str, int] = {}
        """The number of every name that was ever logged."""
        self._lock = threading.Lock()
        self._forget()

    def _forget(self) -> None:
        world_size = self.world_size
        # A log call costs 20 bytes, and each of its values 16 more.
        self._calls = array("i"), array("q"), array("d")
        self._values = array("i"), array("i"), array("d")
        """The columns of `_Calls` and `_Values`, which grow."""
        self._names: dict[str, int] = {}
        """The number of each name, in the order in which they first came."""
        self._last, self._has = np.zeros((0, world_size)), np.zeros((0, world_size), bool)
        """By name and rank the last value, and whether there is any."""
        self._not_finite: NotFinite | None = None
        self._curves: dict[tuple[str, int], Thinned] = defaultdict(Thinned)
        self._means: dict[str, Mean] = defaultdict(lambda: Mean(world_size))
        self._drawn: dict[str, int] = defaultdict(int)
        """By name, how many of all values its curves have seen."""
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
            counts, widths = [len(log.steps) for log in logs], [len(log.names) for log in logs]
            ranks = np.repeat(np.array([log.rank for log in logs], np.int32), counts)
            names = np.array([n for log in logs for n in self._numbers_of(log.names) * len(log.steps)], np.int32)
            calls = np.repeat(np.arange(len(ranks), dtype=np.int32), np.repeat(widths, counts))
            steps, times_s, values = map(b"".join, zip(*((log[2:]) for log in logs), strict=True))
            self._take(
                _Calls(ranks, np.frombuffer(steps, np.int64), np.frombuffer(times_s)),
                _Values(calls, names, np.frombuffer(values)),
            )

    def _numbers_of(self, names: tuple[str, ...]) -> list[int]:
        return [self._numbers.setdefault(name, len(self._numbers)) for name in names]

    def _sift(self) -> None:
        """Take all calls once more, without those that ranks which have gone back will take again."""
        (ranks, steps, times_s), (calls, names, values) = self._columns()
        stays = np.ones(len(ranks), bool)
        for rank, step in self._back.items():
            mine = np.flatnonzero(ranks == rank)
            again = steps[mine] >= step
            if again.any():
                stays[mine[again.argmax() :]] = False
        self._back = {}
        self._forget()
        self.sifted += 1
        of_those, number = stays[calls], (np.cumsum(stays) - 1).astype(np.int32)
        self._take(
            _Calls(ranks[stays], steps[stays], times_s[stays]),
            _Values(number[calls[of_those]], names[of_those], values[of_those]),
        )

    def _take(self, new: _Calls, logged: _Values) -> None:
        """Take calls, and their values, whose calls are counted from the first of these."""
        (ranks, steps, times_s), (calls, names, values) = new, logged
        columns: Any = zip(
            (*self._calls, *self._values), (*new, *logged._replace(calls=calls + len(self._calls[0]))), strict=True
        )
        for kept, more in columns:
            kept.frombytes(more.tobytes())
        self._steps += np.bincount(ranks, minlength=self.world_size)
        self._last_step[ranks], self._last_time_s[ranks] = steps, times_s  # the last of each rank stays
        self._step_rates.add(ranks, times_s, np.ones(len(ranks)))
        if (more := len(self._numbers) - len(self._last)) > 0:
            room = (max(more, len(self._last)), self.world_size)  # twice as many, so that few new names cost a copy
            self._last = np.concatenate((self._last, np.zeros(room)))
            self._has = np.concatenate((self._has, np.zeros(room, bool)))
        self._last[names, ranks[calls]], self._has[names, ranks[calls]] = values, True  # likewise
        every = list(self._numbers)
        if len(self._names) < len(every):
            found, first = np.unique(names, return_index=True)
            self._names |= {every[n]: n for n in found[np.argsort(first)].tolist() if every[n] not in self._names}
        of_samples = names == self._numbers.get(SAMPLES, -1)
        at = calls[of_samples]
        if len(at):
            self._sample_rates.add(ranks[at], times_s[at], values[of_samples])
        bad = np.flatnonzero(~np.isfinite(values))
        if len(bad):
            at = calls[bad]
            i = np.lexsort((ranks[at], times_s[at], steps[at]))[0]
            of_call = int(steps[at[i]]), float(times_s[at[i]]), int(ranks[at[i]])
            one = NotFinite(*of_call, every[names[bad[i]]], float(values[bad[i]]))
            self._not_finite = min(filter(None, (self._not_finite, one)), key=lambda each: each[:3])

    def _columns(self) -> tuple[_Calls, _Values]:
        """Return everything; a copy, as an array that is read cannot grow."""
        ranks, steps, times_s = map(np.array, self._calls)
        calls, names, values = map(np.array, self._values)
        return _Calls(ranks, steps, times_s), _Values(calls, names, values)

    def _since(self, place: int) -> tuple[_Calls, _Values]:
        """Return the values after so many, and the call of each."""
        calls, names, values = (np.array(column[place:]) for column in self._values)
        first = calls[0] if len(calls) else 0
        ranks, steps, times_s = (np.array(column[first:])[calls - first] for column in self._calls)
        return _Calls(ranks, steps, times_s), _Values(calls, names, values)

    def since(self, place: Place) -> tuple[list[LoggedValue], Place]:
        """Return the values after a place, each rank's in its own order, and the place after them.

        `Place()` is the first of all; where ranks have gone back meanwhile, all that is left comes once more.
        """
        with self.settled():
            place = place if place.sifted == self.sifted else Place(self.sifted)
            (ranks, steps, times_s), (_, names, values) = self._since(place.values)
            every = list(self._numbers)
        said = (every[number] for number in names.tolist())
        found = zip(ranks.tolist(), steps.tolist(), times_s.tolist(), said, values.tolist(), strict=True)
        return list(itertools.starmap(LoggedValue, found)), Place(place.sifted, place.values + len(values))

    # Drawing

    @property
    def version(self) -> tuple[int, int]:
        """Something that differs whenever there is something new to draw."""
        with self.settled():
            return self.sifted, len(self._calls[0])

    def _bring_up(self, names: Iterable[str]) -> None:
        """Draw what has come of these names since they were last asked for."""
        total = len(self._values[2])
        due = [name for name in names if name in self._names and self._drawn[name] < total]
        if not due:
            return
        begin = min(self._drawn[name] for name in due)
        (ranks, steps, _), (_, numbers, values) = self._since(begin)
        for name in due:
            at = np.flatnonzero(numbers == self._names[name])
            at = at[at >= self._drawn[name] - begin]
            if len(at):
                self._draw(name, ranks[at], steps[at], values[at])
            self._drawn[name] = total

    def _draw(self, name: str, ranks: NDArray[np.int32], steps: NDArray[np.int64], y: NDArray[np.float64]) -> None:
        """Take values of one name into its curves."""
        for rank in np.unique(ranks).tolist():
            mine = ranks == rank
            self._curves[name, rank].add(steps[mine].astype(np.float64), y[mine])
        if self.world_size > 1:
            self._means[name].add(ranks, steps, y)

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
        (ranks, steps, _), (calls, names, values) = self._columns()
        at = names == self._names.get(name, -1)
        return ranks[calls[at]], steps[calls[at]], values[at]

    @property
    def not_finite(self) -> NotFinite | None:
        """The NaN or Inf of the earliest step, of those that came at the same step the first; None if there is none.

        What ranks have taken back is forgotten.
        """
        with self.settled():
            return self._not_finite

    def curves(self, name: str, ranks: Iterable[int] | None = None) -> dict[str, Points]:
        """Return thinned (steps, values) of `name` by rank ("rank 0" …), of all or of these, and of their "mean".

        There is a mean only of steps that every rank of the run has logged (of many ranks, most of those that log the
        name), and only with several ranks.
        """
        ranks = range(self.world_size) if ranks is None else ranks
        with self.settled():
            self._bring_up([name])
            drawn = {f"rank {rank}": points for rank in ranks if len((points := self._points(name, rank))[0])}
            mean = self._mean_points(name)
            return {**drawn, MEAN: mean} if len(mean[0]) else drawn

    def drawn(self, asked: Sequence[int] = ()) -> list[Curve]:
        """Return the curves of a chart: of each name each rank and then the mean. `asked` are ranks to be shown."""
        names = self.charted
        with self.settled():
            self._bring_up(names)
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
            self._bring_up([name])
            known = self._mean_points(name)
            if len(known[0]) or name not in self._names:
                return known
            logging = np.flatnonzero(self._has[self._names[name]])
            ranks, steps, y = self._logged(name)
            mean = Mean(len(logging))
            mean.add(np.searchsorted(logging, ranks), steps, y)
            return mean.curve.points()

    def _mean_points(self, name: str) -> Points:
        return self._means[name].curve.points()

    def _points(self, name: str, rank: int) -> Points:
        return self._curves[name, rank].points()

    def progress(self, rank: int) -> Progress:
        """Return where a rank stands."""
        with self.settled():
            last = {name: float(self._last[n, rank]) for name, n in self._names.items() if self._has[n, rank]}
            return Progress(
                steps := int(self._steps[rank]),
                int(self._last_step[rank]) if steps else None,
                float(self._last_time_s[rank]),
                float(self._step_rates.per_s()[rank]),
                float(self._sample_rates.per_s()[rank]),
                last,
            )

    def frame(self) -> pd.DataFrame:
        """Return all log calls as a DataFrame: `rank`, `step`, `time_s`, then a column per name; NaN where not logged.

        Rows are in each rank's own order, rank after rank.
        """
        with self.settled():
            total = len(self._calls[0])
            if self._frame is None or self._frame[0] != total:
                self._frame = (total, self._build_frame())
            return self._frame[1].copy()

    def _build_frame(self) -> pd.DataFrame:
        import pandas as pd

        (ranks, steps, times_s), (calls, names, values) = self._columns()
        table = np.full((len(self._numbers), len(ranks)), np.nan)
        table[names, calls] = values
        order = np.argsort(ranks, kind="stable")
        columns: dict[str, Any] = {
            "rank": ranks[order].astype(np.int64),
            "step": steps[order],
            "time_s": times_s[order],
            **{name: table[number, order] for name, number in self._names.items()},
        }
        return pd.DataFrame(columns)
