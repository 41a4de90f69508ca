"""Exercise: gather uneven parts."""

from __future__ import annotations

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
    known = {"the parts are in another order": torch.cat(parts[::-1])}
    t.equal("rows", rows, torch.cat(parts), None, known)


# The last rank first.
EXERCISE.slip("in_reverse", "the parts are in another order", ("return rows", "return torch.cat(parts[::-1])"))

# Rank 0's part.
EXERCISE.slip("forgets_its_own", "`rows` has shape", ("return rows", "return rows[counts[0] :]"))

# Nobody sends.
EXERCISE.slip("waits_for_its_own_message", "a hang: rank", ("dist.send(part, 0)", "pass"))

# Its own part.
EXERCISE.slip(
    "every_rank_returns", "returned something, expected None on all ranks but 0", ("return None", "return part")
)


@EXERCISE.wrong("calls dist.gather, which this exercise does not allow")
def calls_the_collective(part, counts, rank, world_size):
    """It wants equal parts."""
    parts = [torch.empty_like(part) for _ in counts] if rank == 0 else None
    dist.gather(part, parts, 0)
    return torch.cat(parts) if parts else None


# Off by one.
EXERCISE.slip(
    "receives_from_itself", "calls dist.recv with its own rank, 0", ("range(1, world_size)", "range(world_size)")
)
