"""More ranks than can be listed one by one: the ranks and the lines of output that the reader asks for."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from labkit.failures.grouping import rank_list
from labkit.monitor.large_world import ASKED

if TYPE_CHECKING:
    from labkit.monitor.record import RunRecord

FOUND = 200
"""Lines of output that are shown, at most."""

TAIL = 5
"""Lines shown of each listed rank, and of rank 0, while nothing is searched for."""


def read_ranks(text: str, world_size: int) -> list[int]:
    """Return the ranks that are written as "3, 40-43": those that the run has, in order, `ASKED` at most."""
    spans = re.findall(r"(\d+)(?:\s*[-–]\s*(\d+))?", text)
    found = {rank for first, last in spans for rank in range(int(first), min(int(last or first) + 1, world_size))}
    return sorted(found)[:ASKED]


def read_first(run: RunRecord, asked: Sequence[int] = ()) -> list[int]:
    """Return whose output is shown: rank 0 and those that are listed."""
    return list(dict.fromkeys([0, *run.recorded.listed(run.states, asked)]))


def output_lines(run: RunRecord, words: str, asked: Sequence[int] = ()) -> list[str]:
    """Return lines of the ranks' output, each with its ranks: those with the words in them; without, the last ones.

    The last ones are of rank 0 and of the ranks that are listed.
    """
    if words:
        found = [f"[{rank_list(ranks)}] {line}" for line, ranks in run.search_output(words)]
        more = [f"… and {len(found) - FOUND:,} more lines: run.search_output({words!r})"] if found[FOUND:] else []
        return [*found[:FOUND], *more] or [f"no rank's output has {words!r} in it"]
    tails = run.output_tail(TAIL)
    return [f"[rank {rank}] {line}" for rank in read_first(run, asked) for line in tails[rank].splitlines()]
