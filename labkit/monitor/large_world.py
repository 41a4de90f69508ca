"""What many ranks logged: every call is kept, and of each name a band is drawn, not a curve for each rank."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from labkit.monitor.band import Band, Spread
from labkit.monitor.curves import Points
from labkit.monitor.history import MEAN, Curve, History

ASKED = 12
"""Ranks that are drawn and listed because they were asked for, at most."""

APART = 4
"""Ranks that are drawn and listed for standing apart, at most."""

FAILED = 4
"""Ranks that are listed for having failed, at most."""

SLOWEST = 2
"""Ranks that are listed as the slowest."""

EDGES = {
    "least": ("least", "", None),
    "greatest": ("greatest", "least to greatest", "rgba(122, 122, 122, 0.2)"),
    "lower": ("lower quarter", "", None),
    "upper": ("upper quarter", "middle half", "rgba(122, 122, 122, 0.4)"),
}
"""Of the band: what each is called where one points at it, what the legend calls all down to the edge before, and the
colour with which that is filled: of no rank."""


class LargeWorldHistory(History):
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
        """Return for each name the band, the mean, and ranks in slots: those that stand apart, and those asked for.

        The slots stay when other ranks come to stand apart, so that a live chart can be updated in place.
        """
        asked = asked[:ASKED]
        apart = sorted([rank for rank in self.apart() if rank not in asked][:APART])
        drawn = [*apart, *asked]
        labels = [f"rank {rank}" for rank in drawn]
        labels[len(apart) : len(apart)] = [""] * (APART - len(apart))
        found: list[Curve] = []
        for name in self.charted:
            band = self.band(name)
            for key, (said, label, fill) in EDGES.items():
                look = {"line": {"width": 0}, "mode": "lines", "hovertemplate": f"{said} %{{y:.4g}}<extra></extra>"}
                look |= {"fill": "tonexty", "fillcolor": fill} if fill else {}
                found.append(Curve(name, key, label, band.steps, getattr(band, key), look))
            of_ranks = self.curves(name, drawn)
            for key, label in [(MEAN, MEAN), *((f"slot {slot}", label) for slot, label in enumerate(labels))]:
                found.append(Curve(name, key, label, *of_ranks.get(label, ([], []))))
        return found

    def listed(self, states: Sequence[str], asked: Sequence[int] = ()) -> dict[int, str]:
        """Return the ranks to list, each with why: asked for, failed, apart from the others in a value, slowest.

        The slowest of those at work are the most seconds behind, and among those the fewest steps a second: in whole
        seconds and tenths of the usual pace, for of ranks that go on together none is slow.
        """
        said = [(rank, "asked for") for rank in asked[:ASKED]]
        said += [(rank, state) for rank, state in enumerate(states) if state == "failed"][:FAILED]
        said += [(rank, f"apart in {name}") for rank, name in self.apart().items()][:APART]
        logged, per_s = self.paces()
        if logged.any():
            at_work = np.array([state == "running" for state in states])
            usual = np.nanmedian(per_s) if np.isfinite(per_s).any() else 1.0
            behind_s = np.round((logged.max() - 1 - logged).clip(0) / usual)  # one step more or less is nothing
            pace = np.round(np.nan_to_num(per_s / usual, nan=1), 1)
            order = np.lexsort((pace, -behind_s))
            is_slow = at_work & ((behind_s > 0) | (pace < 1))
            said += [(rank, "slowest") for rank in order[is_slow[order]].tolist()][:SLOWEST]
        return {rank: ", ".join(why for each, why in said if each == rank) for rank, _ in said}

    def headline(self, states: Sequence[str]) -> str:
        """Return how many ranks are in which state, how often they have logged, and how fast."""
        said = [f"{len(states):,} ranks: " + ", ".join(f"{n:,} {state}" for state, n in Counter(states).most_common())]
        logged, per_s = self.paces()
        if logged.any():
            said.append(f"logged {_span(logged.min(), logged.max(), ',.0f')} times")
        if np.isfinite(per_s).any():
            said.append(f"{_span(np.nanmin(per_s), np.nanmax(per_s), '.3g')} steps/s")
        if apart := len(self.apart()):
            said.append(f"{apart:,} {'stands' if apart == 1 else 'stand'} apart")
        return " · ".join(said)


def _span(least: float, greatest: float, form: str) -> str:
    low, high = f"{least:{form}}", f"{greatest:{form}}"
    return low if low == high else f"{low} to {high}"
