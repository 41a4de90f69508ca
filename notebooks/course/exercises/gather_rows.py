"""Exercise: gather uneven parts."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from course.exercises.base import POINT_TO_POINT, Exercise
from course.exercises.scatter_rows import counts_of
from course.exercises.trial import Trial

EXERCISE = Exercise(
    lesson="03",
    title="Gather uneven parts",
    statement="""
    The way back: every rank has `part`, its rows, and knows how many rows each rank has (`counts`; some may have
    none). Return all rows on rank 0, in the order of the ranks, and None on the others. Messages only.
    """,
    hints=(
        "Rank 0 makes room for all: `torch.empty(sum(counts), columns)`, and `split(counts)` gives views into it.",
        "It can receive straight into these views, rank after rank; its own part is copied.",
    ),
    why="Receiving into views of the result needs no concatenation, and the order of the ranks is that of the views.",
    allowed=POINT_TO_POINT,
    cases=({"most": 4, "columns": 3}, {"most": 2, "columns": 1}, {"most": 1, "columns": 5}),
)


@EXERCISE.reference
def gather_rows(part, counts, rank, world_size):
    """Return all parts below each other, (sum(counts), columns), on rank 0, and None on the others."""
    if rank != 0:
        dist.send(part, 0)
        return None
    rows = torch.empty(sum(counts), part.shape[1])
    parts = rows.split(counts)
    parts[0].copy_(part)
    for other in range(1, world_size):
        dist.recv(parts[other], other)
    return rows


@EXERCISE.trial
def trial(t: Trial, most: int, columns: int) -> None:
    """Call it, then compare on rank 0."""
    counts = counts_of(t.world_size, most)
    if t.case == 0 and t.world_size > 1:
        counts[1] = 2
    parts = [t.numbers(counts[rank], columns, of=rank) for rank in range(t.world_size)]
    part = parts[t.rank].clone()
    rows = t.call(part, list(counts), t.rank, t.world_size)
    t.unchanged("part", part, parts[t.rank])
    if t.rank:
        t.require(rows is None, "returned something, expected None on all ranks but 0")
        return
    known = {"the parts are in another order": torch.cat(parts[::-1])} if t.world_size > 1 else {}
    t.equal("rows", rows, torch.cat(parts), None, known)


@EXERCISE.wrong("the parts are in another order")
def in_reverse(part: Any, counts: Any, rank: int, world_size: int) -> Any:
    """The last rank first."""
    rows = gather_rows(part, counts, rank, world_size)
    return None if rows is None else torch.cat(rows.split(counts)[::-1])


@EXERCISE.wrong("`rows` has shape")
def forgets_its_own(part: Any, counts: Any, rank: int, world_size: int) -> Any:
    """Rank 0's part."""
    rows = gather_rows(part, counts, rank, world_size)
    return None if rows is None else rows[counts[0] :]


@EXERCISE.wrong("a hang: rank")
def waits_for_its_own_message(part: Any, counts: Any, rank: int, world_size: int) -> Any:
    """Nobody sends."""
    if rank == 0:
        return gather_rows(part, counts, rank, world_size)
    return None


@EXERCISE.wrong("returned something, expected None on all ranks but 0")
def every_rank_returns(part: Any, counts: Any, rank: int, world_size: int) -> Any:
    """Its own part."""
    rows = gather_rows(part, counts, rank, world_size)
    return part if rows is None else rows


@EXERCISE.wrong("calls dist.gather, which this exercise does not allow")
def calls_the_collective(part: Any, counts: Any, rank: int, world_size: int) -> Any:
    """It wants equal parts."""
    parts = [torch.empty_like(part) for _ in counts] if rank == 0 else None
    dist.gather(part, parts, 0)
    return torch.cat(parts) if parts else None


@EXERCISE.wrong("calls dist.recv with its own rank, 0")
def receives_from_itself(part: Any, counts: Any, rank: int, world_size: int) -> Any:
    """Off by one."""
    if rank:
        dist.send(part, 0)
        return None
    parts = list(torch.empty(sum(counts), part.shape[1]).split(counts))
    for other in range(world_size):
        dist.recv(parts[other], other)
    return torch.cat(parts)
