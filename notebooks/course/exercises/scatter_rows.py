"""Exercise: scatter uneven parts."""

from __future__ import annotations

import torch
import torch.distributed as dist

from course.exercises.base import POINT_TO_POINT, Exercise
from course.exercises.trial import Trial

EXERCISE = Exercise(
    lesson="03",
    title="Scatter uneven parts",
    statement="""
    Rank 0 has `rows`, all others have None. Return each rank's part: the first `counts[0]` rows on rank 0, the next
    `counts[1]` on rank 1, and so on; a part may be empty. No rank gets more than its part.

    `dist.scatter` wants equal parts; messages (`send`, `recv`, `isend`, `irecv`) do not. `rows` stays as it is.
    """,
    hints=(
        "`rows.split(counts)` cuts rows into parts of these sizes.",
        "The receiver must make room first: `torch.empty(counts[rank], columns)`.",
        "Rank 0 keeps a part of its own, and sends that to nobody.",
    ),
    why="Everybody knows `counts`, so each receiver can make room of the right size and no message about sizes "
    "is needed.",
    allowed=POINT_TO_POINT,
    cases=({"most": 4, "columns": 3}, {"most": 2, "columns": 1}, {"most": 1, "columns": 5}),
)


@EXERCISE.reference
def scatter_rows(rows, counts, columns, rank, world_size):
    """Return this rank's part, (counts[rank], columns), of rank 0's `rows`, (sum(counts), columns), None elsewhere."""
    if rank == 0:
        parts = rows.split(counts)
        for other in range(1, world_size):
            dist.send(parts[other].contiguous(), other)
        return parts[0].clone()
    part = torch.empty(counts[rank], columns)
    dist.recv(part, 0)
    return part


def counts_of(world_size: int, most: int) -> list[int]:
    """Return uneven counts: most, 0, most + 1 …"""
    return [(most, 0, most + 1, most - 1)[rank] for rank in range(world_size)]


@EXERCISE.trial
def trial(t: Trial, most: int, columns: int) -> None:
    """Call it, then compare with the rows that belong to this rank."""
    counts = counts_of(t.world_size, most)
    if t.case == 0 and t.world_size > 1:
        counts[1] = 2
    rows = t.numbers(sum(counts), columns, of=0)
    given = rows.clone() if t.rank == 0 else None
    part = t.call(given, list(counts), columns, t.rank, t.world_size)
    parts = rows.split(counts)
    known = {f"that is the part of rank {other}": parts[other] for other in range(t.world_size) if other != t.rank}
    t.equal("part", part, parts[t.rank], None, known)
    if given is not None:
        t.unchanged("rows", given, rows)
        own = 4 * columns * (sum(counts) - counts[0])
        sent = t.traffic.bytes_sent
        t.require(sent <= own, f"sent {sent} B, but the parts of the others are {own} B")


@EXERCISE.wrong("`part` has shape")
def equal_parts(rows, counts, columns, rank, world_size):
    """As dist.scatter would."""
    size = sum(counts) // world_size
    return scatter_rows(
        None if rows is None else rows[: size * world_size], [size] * world_size, columns, rank, world_size
    )


@EXERCISE.wrong("but the parts of the others are")
def sends_everything(rows, counts, columns, rank, world_size):
    """Each takes his part himself."""
    if rank == 0:
        for other in range(1, world_size):
            dist.send(rows, other)
    else:
        rows = torch.empty(sum(counts), columns)
        dist.recv(rows, 0)
    return rows.split(counts)[rank].clone()


# Its own part is forgotten.
EXERCISE.slip(
    "rank_0_returns_nothing",
    "`part` is None, expected a tensor of shape (4, 3): no return?",
    ("return parts[0].clone()", "return None"),
)

# Half of it.
EXERCISE.slip("nobody_receives", "waits in send for rank", ("dist.recv(part, 0)", "pass"))


@EXERCISE.wrong("raised AttributeError: 'NoneType' object has no attribute 'split'")
def every_rank_cuts(rows, counts, columns, rank, world_size):
    """Only rank 0 has rows."""
    return rows.split(counts)[rank]


# The parts of other rows.
EXERCISE.slip("cuts_from_the_wrong_end", "`part[0, 0]` is", ("rows.split(counts)", "rows.flip(0).split(counts)"))
