"""Exercise: DiLoCo's outer step."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from course.exercises.base import Cost, Exercise
from course.exercises.trial import Trial

EXERCISE = Exercise(
    lesson="26",
    title="The outer step",
    statement="""
    All ranks began a round with the same weights `start`; after its local steps each has weights
    `local` of its own. The difference `start − local`, averaged over the ranks, is the round's *outer
    gradient* g. Do a step of SGD with Nesterov momentum with it, as `torch.optim.SGD(nesterov=True)`
    does: velocity ← momentum · velocity + g, then weights ← start − lr · (g + momentum · velocity),
    with the new velocity.

    Return (weights, velocity), equal on all ranks. All vectors are flat; leave the three that you are
    given as they are. One `dist.all_reduce`.
    """,
    hints=(
        "`start` is the same on all ranks, so the average of the differences is `start` minus the average of `local`.",
        "`start - local` is a new tensor, which `all_reduce` may overwrite; then divide by the number of ranks.",
        "Nesterov uses the new velocity: `g + momentum * velocity`, where plain momentum uses `velocity`.",
    ),
    why="The average of the differences points from the mean of the new weights back to the old ones, as a gradient "
    "would; with lr 1 and no momentum the step ends in that mean, which is local SGD.",
    allowed=("all_reduce",),
    cases=(
        {"size": 3, "lr": 0.5, "momentum": 0.25, "is_first": False},
        {"size": 2, "lr": 0.25, "momentum": 0.5, "is_first": True},
        {"size": 1, "lr": 1.0, "momentum": 0.0, "is_first": False},
    ),
)


@EXERCISE.reference
def outer_step(start, local, velocity, lr, momentum):
    """Return (weights, velocity) after a round of local steps from `start` to `local`; flat tensors, (N,) each."""
    gradient = start - local
    dist.all_reduce(gradient)
    gradient /= dist.get_world_size()
    velocity = momentum * velocity + gradient
    return start - lr * (gradient + momentum * velocity), velocity


@EXERCISE.trial
def trial(t: Trial, size: int, lr: float, momentum: float, is_first: bool) -> None:
    """Call it, and compare with the average in one process."""
    n = t.world_size
    start = t.numbers(size, of=0, salt="start")
    before = torch.zeros(size) if is_first else t.numbers(size, of=0, salt="velocity")
    locals_ = [t.numbers(size, of=rank, salt="local") for rank in range(n)]

    def after(gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        velocity = momentum * before + gradient
        return start - lr * (gradient + momentum * velocity), velocity

    total = torch.stack([start - local for local in locals_]).sum(0)
    weights, velocity = after(total / n)
    given = start.clone(), locals_[t.rank].clone(), before.clone()
    found = t.call(*given, lr, momentum)
    t.returned(found, "(weights, velocity)")
    for what, now, was in zip(("start", "local", "velocity"), given, (start, locals_[t.rank], before), strict=True):
        t.unchanged(what, now, was)
    known = {
        "the step goes the other way: the difference is start − local": after(-total / n),
        "that is momentum without Nesterov's look ahead": (start - lr * velocity, velocity),
    }
    own = after(start - locals_[t.rank])
    known["that is this rank's own difference, not the average"] = own
    known["the differences are summed, not averaged"] = after(total)
    t.equal("weights", found[0], weights, start, {said: wrong[0] for said, wrong in known.items()})
    of_velocity = {"that is the velocity before the round": before}
    t.equal("velocity", found[1], velocity, None, of_velocity)
    t.reduced_once()


@EXERCISE.best
def best(world_size: int, size: int, **_: Any) -> Cost:
    """Return one all-reduce of all weights."""
    return Cost.all_reduce(4 * size, world_size)
