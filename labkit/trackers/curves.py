"""From what ranks log to what a tracker gets: steps of curves, each once and in order. No thread, no clock."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from typing import NamedTuple

from labkit.protocol.events import Log

PATIENCE_S = 5.0
"""How long a value waits for ranks that have never logged it, by the clock of those that have gone on …"""

PATIENCE_STEPS = 3
"""… and for so many of their steps. Then they are taken not to log it: Accelerate, say, logs on rank 0 alone."""

WAITING_STEPS = 20_000
"""Steps of a curve that wait for slower ranks at most; older ones are left out, as in the run's chart."""


class Logged(NamedTuple):
    """A value, and when it was logged, since the run began."""

    value: float
    time_s: float


class Row(NamedTuple):
    """What is to be written at a step."""

    step: int
    values: dict[str, float]
    time_s: float
    """When the last of it was logged, since the run began."""


class _Fits:
    """Which of several trainings in one run a rank is in: a fit, or a fold, begins its steps again."""

    def __init__(self) -> None:
        self.count = 1
        self._steps: dict[str, tuple[int, int]] = {}
        """The first and the last step of each value."""

    def of(self, name: str, step: int) -> int:
        """Return the number of the training to which a value belongs; 1 is the first.

        A new one has begun where a value that has had several steps is at its first again, or before. One step that
        comes again, or late, is no new one.
        """
        first, last = self._steps.get(name, (step, step))
        if step <= first < last:
            self.count, self._steps = self.count + 1, {}
            first = last = step
        self._steps[name] = first, max(last, step)
        return self.count


class _Curve:
    """The mean of one value over the ranks that log it, at the steps that all of them have."""

    def __init__(self, ranks: Collection[int]) -> None:
        self._logging: set[int] = set()
        self._unknown = set(ranks)
        """Ranks that may log it yet."""
        self._waiting: OrderedDict[int, dict[int, Logged]] = OrderedDict()
        """What has come of steps that are not complete, by step. To take the first off a long `dict` is dear."""
        self._first_s = 0.0
        self._written = self._written_before = -(2**63) - 1  # less than any step
        """The last step that was written, and that was when all began again."""
        self.again = 0
        """Values that came for a step before the last that was written, but for those of a run that began again."""

    def begin_again(self) -> None:
        self._waiting.clear()
        self._written_before = self._written

    def take(self, rank: int, step: int, value: float, time_s: float) -> dict[int, Logged]:
        """Take a value of a rank; return the means that it completes, by step."""
        if step <= self._written:
            self.again += step > self._written_before
            return {}
        joins = rank not in self._logging
        self._logging.add(rank)
        self._unknown.discard(rank)
        self._first_s = self._first_s if self._waiting else time_s
        self._waiting.setdefault(step, {})[rank] = Logged(value, time_s)
        if self._unknown:
            long_enough = time_s - self._first_s >= PATIENCE_S and len(self._waiting) > PATIENCE_STEPS
            return self.without(self._unknown) if long_enough else {}
        if joins:
            return self._complete(sorted(self._waiting))
        if len(self._waiting) > WAITING_STEPS:
            self._waiting.popitem(last=False)
        return self._complete([step])

    def without(self, ranks: Collection[int]) -> dict[int, Logged]:
        """Wait no longer for these ranks' first value; return the means that are complete then, by step."""
        if not self._unknown:
            return {}
        self._unknown -= set(ranks)
        return {} if self._unknown else self._complete(sorted(self._waiting))

    def _complete(self, steps: list[int]) -> dict[int, Logged]:
        found = {}
        for step in steps:
            logged = self._waiting.get(step, {}).values()
            if step > self._written and len(logged) >= len(self._logging):
                mean = sum(each.value for each in logged) / len(logged)
                found[step] = Logged(mean, max(each.time_s for each in logged))
                self._written = step
        while self._waiting and next(iter(self._waiting)) <= self._written:  # no rank logs an earlier step any more
            self._waiting.popitem(last=False)
        return found


class Curves:
    """The curves of one run for one tracker: means over ranks, or one for each rank."""

    def __init__(self, world_size: int, by_rank: bool) -> None:
        self._world_size, self._by_rank = world_size, by_rank
        self._curves: dict[str, _Curve] = {}
        self._ready: dict[int, dict[str, Logged]] = {}
        self._fits = [_Fits() for _ in range(world_size)]
        self.began_again: tuple[int, int, str] | None = None
        """The first rank whose steps began again, at which step, and what its value is called from then on."""

    def begin_again(self) -> None:
        """Have all log calls given once more, with those since the run went back to a checkpoint."""
        self._fits = [_Fits() for _ in range(self._world_size)]
        for curve in self._curves.values():
            curve.begin_again()

    def take(self, log: Log) -> None:
        """Take log calls of a rank, in their order."""
        values = iter(log.values)
        for step, time_s in zip(log.steps, log.times_s, strict=True):
            for name in log.names:
                self._add(name, log.rank, step, next(values), time_s)

    def _add(self, name: str, rank: int, step: int, value: float, time_s: float) -> None:
        fit = self._fits[rank].of(name, step)
        name = name if fit == 1 else f"{name}/{fit}"
        if fit > 1 and self.began_again is None:
            self.began_again = rank, step, name
        label = f"{name}/rank {rank}" if self._by_rank else name
        if label not in self._curves:
            self._curves[label] = _Curve([rank] if self._by_rank else range(self._world_size))
        for at, mean in self._curves[label].take(rank, step, value, time_s).items():
            self._ready.setdefault(at, {})[label] = mean

    def ready(self, ended: Collection[int] = ()) -> list[Row]:
        """Return what is to be written now, step by step; ranks that have ended are not waited for."""
        for label, curve in self._curves.items() if ended else ():
            for at, mean in curve.without(ended).items():
                self._ready.setdefault(at, {})[label] = mean
        rows, self._ready = sorted(self._ready.items()), {}
        return [
            Row(step, {name: v.value for name, v in values.items()}, max(v.time_s for v in values.values()))
            for step, values in rows
        ]

    @property
    def again(self) -> int:
        """Values that were left out because their step, or a later one, had been written."""
        return sum(curve.again for curve in self._curves.values())
