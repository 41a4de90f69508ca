"""What many ranks logged: every call is kept, and of each name a band is drawn, not a curve for each rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from labkit.monitor.curves import Points
from labkit.monitor.history import Curve, History
from labkit.plugins.many import listing
from labkit.plugins.many.band import Band, Spread


class ManyHistory(History):
    """As `History`, at the same cost for any number of ranks."""

    def _forget(self) -> None:
        super()._forget()
        self._spreads: dict[str, Spread] = defaultdict(lambda: Spread(self.world_size))

    def _draw(self, name: str, ranks: NDArray[np.int32], steps: NDArray[np.int64], y: NDArray[np.float64]) -> None:
        self._spreads[name].add(ranks, steps, y)

    def _points(self, name: str, rank: int) -> Points:
        steps, values = self._spreads[name].curve(rank)
        return steps.astype(np.float64), values

    def _mean_points(self, name: str) -> Points:
        band = self._spreads[name].band()
        return band.steps.astype(np.float64), band.mean

    def mean_curve(self, name: str) -> Points:
        """Return (steps, means) of `name`, at the steps that most ranks which log it have logged."""
        with self.settled():
            self._bring_up([name])
            return self._mean_points(name)

    def band(self, name: str) -> Band:
        """Return the band of all ranks' values of `name`."""
        with self.settled():
            self._bring_up([name])
            return self._spreads[name].band()

    def apart(self) -> dict[int, str]:
        """Return the ranks that stand apart, the farthest first, each with the name in which it does so most."""
        names = self.charted
        with self.settled():
            self._bring_up(names)
            drawn = {name: self._spreads[name] for name in names}
            found = sorted((far, -rank, name) for name, each in drawn.items() for rank, far in each.apart().items())
        farthest = {-rank: name for _, rank, name in found}  # of several names the last, where it is farthest, stays
        return {-rank: farthest[-rank] for _, rank, _ in reversed(found)}

    def paces(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return each rank's number of log calls so far, and how many there are a second, NaN where not known."""
        with self.settled():
            return self._steps.copy(), self._step_rates.per_s()

    def drawn(self, asked: Sequence[int] = ()) -> list[Curve]:
        """Return the band of each name, its mean, and the ranks that stand apart or are asked for."""
        return listing.curves(self, asked)

    def listed(self, states: Sequence[str], asked: Sequence[int] = ()) -> dict[int, str]:
        """Return the few ranks to list, each with why."""
        return listing.listed(states, self, asked)

    def headline(self, states: Sequence[str]) -> str:
        """Return how many ranks are in which state, how often they have logged, and how fast."""
        return listing.headline(states, self)
