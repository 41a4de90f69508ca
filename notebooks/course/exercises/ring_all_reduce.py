"""Exercise: all-reduce around a ring."""

from __future__ import annotations

import torch
import torch.distributed as dist

from course.exercises.base import POINT_TO_POINT, Cost, Exercise
from course.exercises.trial import Trial

EXERCISE = Exercise(
    lesson="01",
    title="All-reduce around a ring",
    statement="""
    Replace `tensor` on every rank by the sum over all ranks, in place, with messages to and from the
    two neighbours only (`isend` and `irecv`, one by one or as a pair; rank n − 1 is the neighbour of rank 0).

    Cut the tensor into n pieces, nearly equal. In n − 1 steps every rank passes a piece to the right
    and adds the one that comes from the left; then each rank has one piece whole. In n − 1 more steps
    the whole pieces go round. So each rank sends about 2(n − 1)/n of the tensor.

    It may have any shape and any size, also one that n does not divide, and need not be contiguous: then
    `reshape(-1)` is a copy, which must be copied back.
    """,
    hints=(
        "`tensor_split(world_size)` cuts a flat tensor into nearly equal pieces, as views: adding to a piece "
        "changes the whole.",
        "In step s rank r sends piece r − s and receives piece r − s − 1, both modulo n; in the first n − 1 "
        "steps it adds what arrives, later it copies.",
        "Begin both messages, then wait for both: if all ranks wait in `send`, nobody receives.",
    ),
    why="Every piece goes once around to be summed and once around to be spread, and all links carry a piece at "
    "the same time, so no rank sends more than twice the tensor.",
    allowed=POINT_TO_POINT,
    cases=(
        {"shape": (12,)},
        {"shape": (7,)},
        {"shape": (5, 3), "contiguous": False},
        {"shape": (2,)},
        {"shape": (1201,)},
    ),
)


@EXERCISE.reference
def ring_all_reduce(tensor, rank, world_size):
    """Replace `tensor` (one shape on all ranks) by its sum over the ranks, in place. Called on every rank."""
    flat = tensor.reshape(-1)  # a copy if it is not contiguous
    pieces = flat.tensor_split(world_size)
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    for step in range(2 * (world_size - 1)):
        piece = pieces[(rank - step - 1) % world_size]
        arrived = torch.empty_like(piece)
        sending = dist.P2POp(dist.isend, pieces[(rank - step) % world_size], right)
        receiving = dist.P2POp(dist.irecv, arrived, left)
        for message in dist.batch_isend_irecv([sending, receiving]):
            message.wait()
        if step < world_size - 1:
            piece += arrived
        else:
            piece.copy_(arrived)
    tensor.copy_(flat.view_as(tensor))


@EXERCISE.trial
def trial(t: Trial, shape: tuple[int, ...], contiguous: bool = True) -> None:
    """Call it, then compare with the sum, and look at who was sent how much."""
    given = [t.numbers(*shape, of=rank) for rank in range(t.world_size)]
    total = torch.stack(given).sum(0)
    tensor = given[t.rank].clone()
    if not contiguous:
        tensor = tensor.t().contiguous().t()
    t.call(tensor, t.rank, t.world_size)
    known = {
        "averaged, where the sum is asked for": total / t.world_size,
        "the sum of a neighbour's tensor and its own": given[t.rank] + given[t.rank - 1],
        "a neighbour's tensor": given[t.rank - 1],
    }
    t.equal("tensor", tensor, total, given[t.rank], known)
    strangers = set(t.traffic.sent_to) - {(t.rank + 1) % t.world_size, (t.rank - 1) % t.world_size}
    t.require(not strangers, f"sent to rank {min(strangers, default=0)}, which is no neighbour in the ring")
    most = best(t.world_size, shape).bytes
    sent = t.traffic.bytes_sent
    t.require(
        sent <= most,
        f"sent {sent:,} B; around a ring no rank sends more than 2(n − 1)/n of the tensor, here {most:,} B",
    )


@EXERCISE.best
def best(world_size: int, shape: tuple[int, ...], contiguous: bool = True) -> Cost:
    """Return what a rank sends whose pieces are the larger ones."""
    steps = 2 * (world_size - 1)
    whole, more = divmod(torch.Size(shape).numel(), world_size)
    # Of all pieces a rank sends each twice, but for two that it sends once: at best the smaller ones.
    sizes = sorted([whole + 1] * more + [whole] * (world_size - more))
    return Cost(steps, 4 * (2 * sum(sizes) - sizes[0] - sizes[min(1, world_size - 1)]) if steps else 0)
