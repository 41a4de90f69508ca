"""Exercise: broadcast along a tree."""

from __future__ import annotations

from math import ceil, log2

import torch
import torch.distributed as dist

from course.exercises.base import POINT_TO_POINT, Cost, Exercise
from course.exercises.trial import Trial

EXERCISE = Exercise(
    lesson="01",
    title="Broadcast along a tree",
    statement="""
    Copy rank 0's tensor into the tensor of every rank, in place, with `send` and `recv` (or `isend` and `irecv`)
    only.

    If rank 0 sent to every rank itself, the others would sit idle while it sends n − 1 times. Instead, let each rank
    that has the tensor pass it on: in the first round 0 → 1, in the second 0 → 2 and 1 → 3, then 0 → 4 … 3 → 7. So no
    rank sends more than ⌈log₂ n⌉ times. The number of ranks need not be a power of two.
    """,
    hints=(
        "In round k, which ranks have the tensor already? Those below 2ᵏ.",
        "With `distance = 1, 2, 4, …`: ranks below `distance` send to `rank + distance`, if there is such a rank.",
        "Ranks from `distance` up to `2 * distance - 1` receive from `rank - distance`. All others wait for a "
        "later round.",
    ),
    why="After each round twice as many ranks have the tensor, so ⌈log₂ n⌉ rounds are enough for any n.",
    allowed=POINT_TO_POINT,
    cases=({"shape": (5,)}, {"shape": (3, 7)}, {"shape": (1,)}),
)


@EXERCISE.reference
def broadcast_tree(tensor, rank, world_size):
    """Make `tensor` (any shape, the same on every rank) equal to rank 0's, in place. Called on every rank."""
    distance = 1
    while distance < world_size:
        if rank < distance:
            if rank + distance < world_size:
                dist.send(tensor, rank + distance)
        elif rank < 2 * distance:
            dist.recv(tensor, rank - distance)
        distance *= 2


@EXERCISE.trial
def trial(t: Trial, shape: tuple[int, ...]) -> None:
    """Call it, then compare with rank 0's tensor and count the messages."""
    tensor, before = t.numbers(*shape), t.numbers(*shape)
    t.call(tensor, t.rank, t.world_size)
    t.equal("tensor", tensor, t.numbers(*shape, of=0), before)
    most = ceil(log2(t.world_size))
    sent = t.traffic.count("send")
    t.require(sent <= most, f"sent {sent} messages; along a tree no rank sends more than ⌈log₂ n⌉ = {most}")


@EXERCISE.best
def best(world_size: int, shape: tuple[int, ...]) -> Cost:
    """Return what rank 0 sends."""
    rounds = ceil(log2(world_size))
    return Cost(rounds, rounds * 4 * torch.Size(shape).numel())
