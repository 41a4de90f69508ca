"""More ranks than can be drawn and listed one by one: their band, the few that stand apart, and what one asks for."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from labkit.failures.grouping import rank_list
from labkit.monitor.history import MEAN, Curve

if TYPE_CHECKING:
    from labkit.monitor.run import Run
    from labkit.plugins.many.many_history import ManyHistory

APART = 4
"""Ranks that are drawn and listed for standing apart, at most."""

FAILED = 4
"""Ranks that are listed for having failed, at most."""

SLOWEST = 2
"""Ranks that are listed as the slowest."""

ASKED = 12
"""Ranks that are drawn and listed because they were asked for, at most."""

FOUND = 200
"""Lines of output that are shown, at most."""

TAIL = 5
"""Lines shown of each listed rank, and of rank 0, while nothing is searched for."""

EDGES = {
    "least": ("least", "", None),
    "greatest": ("greatest", "least to greatest", "rgba(122, 122, 122, 0.2)"),
    "lower": ("lower quarter", "", None),
    "upper": ("upper quarter", "middle half", "rgba(122, 122, 122, 0.4)"),
}
"""Of the band: what each is called where one points at it, what the legend calls all down to the edge before, and the
colour with which that is filled: of no rank."""


def curves(history: ManyHistory, asked: Sequence[int] = ()) -> list[Curve]:
    """Return for each name the band, the mean, and ranks in slots: those that stand apart, and those asked for.

    The slots stay when other ranks come to stand apart, so that a live chart can be brought up to date in its place.
    """
    asked = asked[:ASKED]
    apart = sorted([rank for rank in history.apart() if rank not in asked][:APART])
    drawn = [*apart, *asked]
    labels = [f"rank {rank}" for rank in drawn]
    labels[len(apart) : len(apart)] = [""] * (APART - len(apart))
    found: list[Curve] = []
    for name in history.charted:
        band = history.band(name)
        for key, (said, label, fill) in EDGES.items():
            look = {"line": {"width": 0}, "mode": "lines", "hovertemplate": f"{said} %{{y:.4g}}<extra></extra>"}
            look |= {"fill": "tonexty", "fillcolor": fill} if fill else {}
            found.append(Curve(name, key, label, band.steps, getattr(band, key), look))
        of_ranks = history.curves(name, drawn)
        for key, label in [(MEAN, MEAN), *((f"slot {slot}", label) for slot, label in enumerate(labels))]:
            found.append(Curve(name, key, label, *of_ranks.get(label, ([], []))))
    return found


def read_ranks(text: str, world_size: int) -> list[int]:
    """Return the ranks that are written as "3, 40-43": those that the run has, in order, `ASKED` at most."""
    spans = re.findall(r"(\d+)(?:\s*[-–]\s*(\d+))?", text)
    found = {rank for first, last in spans for rank in range(int(first), min(int(last or first) + 1, world_size))}
    return sorted(found)[:ASKED]


def listed(states: Sequence[str], history: ManyHistory, asked: Sequence[int] = ()) -> dict[int, str]:
    """Return the ranks to list, each with why: asked for, failed, apart from the others in a value, slowest.

    The slowest of those at work are the most seconds behind, and among those the fewest steps a second: in whole
    seconds and tenths of the usual pace, for of ranks that go on together none is slow.
    """
    said = [(rank, "asked for") for rank in asked[:ASKED]]
    said += [(rank, state) for rank, state in enumerate(states) if state == "failed"][:FAILED]
    said += [(rank, f"apart in {name}") for rank, name in history.apart().items()][:APART]
    logged, per_s = history.paces()
    if logged.any():
        at_work = np.array([state == "running" for state in states])
        usual = np.nanmedian(per_s) if np.isfinite(per_s).any() else 1.0
        behind_s = np.round((logged.max() - 1 - logged).clip(0) / usual)  # one step more or less is nothing
        pace = np.round(np.nan_to_num(per_s / usual, nan=1), 1)
        order = np.lexsort((pace, -behind_s))
        is_slow = at_work & ((behind_s > 0) | (pace < 1))
        said += [(rank, "slowest") for rank in order[is_slow[order]].tolist()][:SLOWEST]
    return {rank: ", ".join(why for each, why in said if each == rank) for rank, _ in said}


def read_first(run: Run, asked: Sequence[int] = ()) -> list[int]:
    """Return whose output is shown: rank 0 and those that are listed."""
    return list(dict.fromkeys([0, *run.recorded.listed(run.states, asked)]))


def headline(states: Sequence[str], history: ManyHistory) -> str:
    """Return how many ranks are in which state, how often they have logged, and how fast."""
    said = [f"{len(states):,} ranks: " + ", ".join(f"{n:,} {state}" for state, n in Counter(states).most_common())]
    logged, per_s = history.paces()
    if logged.any():
        said.append(f"logged {_span(logged.min(), logged.max(), ',.0f')} times")
    if np.isfinite(per_s).any():
        said.append(f"{_span(np.nanmin(per_s), np.nanmax(per_s), '.3g')} steps/s")
    if apart := len(history.apart()):
        said.append(f"{apart:,} {'stands' if apart == 1 else 'stand'} apart")
    return " · ".join(said)


def _span(least: float, greatest: float, form: str) -> str:
    low, high = f"{least:{form}}", f"{greatest:{form}}"
    return low if low == high else f"{low} to {high}"


def output_lines(run: Run, words: str, asked: Sequence[int] = ()) -> list[str]:
    """Return lines of the ranks' output, each with its ranks: those with the words in them; without, the last ones.

    The last ones are of rank 0 and of the ranks that are listed.
    """
    if words:
        found = [f"[{rank_list(ranks)}] {line}" for line, ranks in run.search_output(words)]
        more = [f"… and {len(found) - FOUND:,} more lines: run.search_output({words!r})"] if found[FOUND:] else []
        return [*found[:FOUND], *more] or [f"no rank's output has {words!r} in it"]
    tails = run.output_tail(TAIL)
    return [f"[rank {rank}] {line}" for rank in read_first(run, asked) for line in tails[rank].splitlines()]
