"""What has come to a run's history since one looked last."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from labkit.monitor.history import History
from labkit.protocol.events import Log


class Place(NamedTuple):
    """A place in a history: `since` returns what came after it."""

    sifted: int = 0
    """How often ranks had gone back."""
    calls: int = 0
    values: int = 0


def since(history: History, place: Place) -> tuple[Iterator[Log], Place]:
    """Return the log calls after a place, each rank's in its own order, and the place after them.

    `Place()` is the first of all; where ranks have gone back meanwhile, all that is left comes once more.
    """
    with history.settled():
        place = place if place.sifted == history.sifted else Place(history.sifted)
        ranks, kinds, steps, times_s, values = history.kept
        ranks, kinds, steps = ranks[place.calls :], kinds[place.calls :], steps[place.calls :]
        times_s, values, names = times_s[place.calls :], values[place.values :], list(history.kinds)
    columns = ranks, kinds, steps, times_s, values
    return _logs(columns, names), Place(place.sifted, place.calls + len(ranks), place.values + len(values))


def _logs(columns: tuple[array[Any], ...], names: list[tuple[str, ...]]) -> Iterator[Log]:
    """Yield stretches of calls of one rank and kind. Not all at once: a first look may find millions."""
    ranks, kinds, steps, times_s, values = columns
    changes = np.flatnonzero((np.diff(ranks) != 0) | (np.diff(kinds) != 0)) + 1
    edges = np.concatenate(([0], changes, [len(ranks)])) if ranks else changes
    at = 0
    for start, stop in itertools.pairwise(map(int, edges)):
        has = names[kinds[start]]
        width = (stop - start) * len(has)
        yield Log(ranks[start], has, steps[start:stop], times_s[start:stop], values[at : at + width])
        at += width
