"""The first value of a run that is NaN or infinite, found in what has been logged since one looked last."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from labkit.monitor.history import History


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


@dataclass
class _Look:
    """How much of a history has been looked at, and what was found there."""

    sifted: int = 0
    calls: int = 0
    values: int = 0
    found: NotFinite | None = None


_looks: weakref.WeakKeyDictionary[History, _Look] = weakref.WeakKeyDictionary()


def first(history: History) -> NotFinite | None:
    """Return the NaN or Inf of the earliest step, of those that came at the same step the first; None if there is none.

    What ranks have taken back is forgotten.
    """
    with history.settled():
        look = _looks.get(history)
        if look is None or look.sifted != history.sifted:
            look = _looks[history] = _Look(history.sifted)
        ranks, kinds, steps, times_s = (np.array(column[look.calls :]) for column in history.kept[:4])
        values = np.array(history.kept[4][look.values :])
        look.calls, look.values = look.calls + len(ranks), look.values + len(values)
        if not np.isfinite(values).all():
            names = list(history.kinds)
            widths = np.array([len(each) for each in names])[kinds]
            bad = np.flatnonzero(~np.isfinite(values))
            at = np.repeat(np.arange(len(ranks)), widths)[bad]  # the calls of those values
            i = np.lexsort((ranks[at], times_s[at], steps[at]))[0]
            call = at[i]
            name = names[kinds[call]][bad[i] - widths[:call].sum()]
            found = NotFinite(int(steps[call]), float(times_s[call]), int(ranks[call]), name, float(values[bad[i]]))
            look.found = min(filter(None, (look.found, found)), key=lambda each: each[:3])
        return look.found
