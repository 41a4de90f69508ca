"""Exercise: the first one. A number, averaged over all ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist

from course.exercises.base import Cost, Exercise
from course.exercises.trial import Trial

EXERCISE = Exercise(
    lesson="00",
    title="The mean over ranks",
    statement="""
    Every rank has a `value`, a float: its own loss, say. Return the mean over all ranks, a float, on every rank. The
    number of ranks is `dist.get_world_size()`; your function is tried with 1 to 4 of them.
    """,
    hints=(
        "`dist.all_reduce` takes a tensor, and replaces it by the sum over the ranks: `torch.tensor(value)`.",
        "A sum is not a mean: divide by the number of ranks, and return `….item()`.",
    ),
    why="An all-reduce is the same call on every rank, and leaves the same sum on each.",
    allowed=("all_reduce",),
    cases=({"values": "first"}, {"values": "second"}),
)


@EXERCISE.reference
def mean_over_ranks(value):
    """Return the mean of all ranks' `value`, a float, on every rank."""
    total = torch.tensor(value)
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


@EXERCISE.trial
def trial(t: Trial, values: str) -> None:
    """Call it with another value on each rank."""
    each = [t.numbers(1, of=rank, salt=values) for rank in range(t.world_size)]
    found = t.call(each[t.rank].item())
    nothing = ": no return?" if found is None else ""
    t.require(isinstance(found, float), f"returned a {type(found).__name__}, expected a float{nothing}")
    total = torch.stack(each).sum()
    known = {"this rank's own value": each[t.rank][0], "summed, not averaged?": total}
    t.equal("mean", torch.tensor(found), total / t.world_size, known=known)


@EXERCISE.best
def best(world_size: int, values: str) -> Cost:
    """Return one all-reduce of one number."""
    return Cost.all_reduce(4, world_size)
