"""Ranks with the same message in one line, and several ranks as text."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Mapping
from typing import TypeVar

What = TypeVar("What", bound=Hashable)

LISTED = 16
"""The most ranks, or spans of ranks, that are listed one by one."""


def alike(each: Iterable[tuple[What, int]]) -> dict[What, list[int]]:
    """Return the ranks of each message, in the order in which the messages first occur."""
    groups: dict[What, list[int]] = {}
    for what, rank in each:
        groups.setdefault(what, []).append(rank)
    return groups


def rank_list(ranks: list[int]) -> str:
    """Return several ranks as text: "rank 1", "ranks 0, 1 and 3"; many as "20 ranks (0–18, 20)"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > LISTED:
        follows = itertools.count()  # ranks that follow each other are all as far from it
        spans = [list(span) for _, span in itertools.groupby(ranks, lambda rank: rank - next(follows))]
        said = [f"{span[0]}–{span[-1]}" if span[1:] else f"{span[0]}" for span in spans[:LISTED]]
        return f"{len(ranks):,} ranks ({', '.join(said)}{', …' if spans[LISTED:] else ''})"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def in_lines(outcomes: Mapping[int, str]) -> list[str]:
    """Return a line for each rank.

    Of more than `LISTED` ranks, those with the same outcome share a line: the rarest outcomes first, and not all.
    """
    if len(outcomes) <= LISTED:
        return [f"rank {rank} {outcome}" for rank, outcome in outcomes.items()]
    groups = sorted(alike((what, rank) for rank, what in outcomes.items()).items(), key=lambda group: len(group[1]))
    lines = [f"{rank_list(who)}: {outcome}" for outcome, who in groups]
    more = [f"… and {len(lines) - LISTED:,} more such lines: see run.states and run.failures"] if lines[LISTED:] else []
    return lines[:LISTED] + more
