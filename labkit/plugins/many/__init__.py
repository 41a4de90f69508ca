"""More ranks than can be drawn and listed one by one: a band, the few that stand apart, and those that one asks for.

    many_history what the ranks logged, by a `band` for each name instead of a curve for each rank, and which few ranks
                 are drawn and listed
    listing      the ranks and the lines of output that the reader asks for
    searching    words looked for in what all ranks have printed
    boxes        two boxes in the live view: ranks to show besides, and words to find in all ranks' output

Of `FEW` ranks or fewer each has its own curve, row and tab: that is the core's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from labkit.monitor.output import RankOutput
    from labkit.monitor.run import Run
    from labkit.plugins.many.boxes import Asking
    from labkit.plugins.many.many_history import ManyHistory
    from labkit.plugins.many.searching import Found

FEW = 16
"""Ranks that are drawn, listed and averaged one by one, at most."""


def history(world_size: int) -> ManyHistory | None:
    """Return what takes in the log calls of so many ranks, if they are many."""
    if world_size <= FEW:
        return None
    from labkit.plugins.many.many_history import ManyHistory

    return ManyHistory(world_size)


def asking(run: Run) -> Asking | None:
    """Return what the live view has in place of a tab for every rank, if they are many."""
    if run.world_size <= FEW:
        return None
    from labkit.plugins.many.boxes import Asking

    return Asking(run)


def search_output(outputs: Iterable[RankOutput], words: str) -> list[Found]:
    """Return the lines that ranks have printed with these words in them, each with its ranks."""
    from labkit.plugins.many.searching import search

    return search(outputs, words)
