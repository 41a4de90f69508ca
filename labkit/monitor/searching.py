"""Words looked for in what all ranks have printed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from labkit.failures.grouping import alike

if TYPE_CHECKING:
    from labkit.monitor.output import RankOutput


class Found(NamedTuple):
    """A line that was looked for."""

    line: str
    ranks: list[int]
    """Which have printed it."""


def search(outputs: Iterable[RankOutput], words: str) -> list[Found]:
    """Return the lines of each rank's output with these words in them, in any case; those of the fewest ranks first."""
    wanted = words.lower()
    lines = (dict.fromkeys(line for line in output.lines() if wanted in line.lower()) for output in outputs)
    ranks = alike((line, rank) for rank, found in enumerate(lines) for line in found)
    return sorted((Found(*each) for each in ranks.items()), key=lambda found: len(found.ranks))
