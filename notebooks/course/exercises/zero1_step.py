"""Exercise: a step of ZeRO-1."""

from __future__ import annotations

import torch
import torch.distributed as dist

from course.exercises.base import Cost, Exercise
from course.exercises.trial import Trial

EXERCISE = Exercise(
    lesson="19",
    title="A step of ZeRO-1",
    statement="""
    Every rank has all `weights` (flat, equal everywhere) and its own `gradient` of them, but of the optimizer's
    `momentum` only its share: the rank-th of `world_size` equal parts. Do one step of SGD with momentum 0.9: with g
    the mean gradient, momentum ← 0.9 · momentum + g, then weights ← weights − lr · momentum. Afterwards `weights`
    (in place) are new and equal on all ranks, and `momentum` (in place) is new.

    No rank may get more of the mean gradient than its share: `dist.reduce_scatter_tensor`, then
    `dist.all_gather_into_tensor`.
    """,
    hints=(
        "`reduce_scatter_tensor(output, input)` leaves in `output` this rank's part of the sum.",
        "With `share = weights.chunk(world_size)[rank]`, a view, the step itself has two lines.",
        "At last everybody needs everybody's share: `all_gather_into_tensor(weights, share)`; give it a copy of "
        "the share, which lies in `weights`.",
    ),
    why="Reduce-scatter and all-gather are the two halves of an all-reduce, so the step sends no more than "
    "before, and each rank keeps one n-th of the optimizer's state.",
    allowed=("reduce_scatter_tensor", "all_gather_into_tensor"),
    cases=({"size": 3, "lr": 0.5}, {"size": 1, "lr": 0.25}),
)


@EXERCISE.reference
def zero1_step(weights, gradient, momentum, lr, rank, world_size):
    """Update `weights` (N,) and this rank's `momentum` (N / world_size,) in place. `gradient` is (N,), its own."""
    mean = torch.empty_like(momentum)
    dist.reduce_scatter_tensor(mean, gradient)
    mean /= world_size
    momentum.mul_(0.9).add_(mean)
    share = weights.chunk(world_size)[rank] - lr * momentum
    dist.all_gather_into_tensor(weights, share)


@EXERCISE.trial
def trial(t: Trial, size: int, lr: float) -> None:
    """Call it twice, and compare with SGD on one process."""
    n = t.world_size
    weights, momentum = t.numbers(size * n, of=0), torch.zeros(size)
    true, true_momentum = weights.clone(), torch.zeros(size * n)
    for step in range(2):
        given = [t.numbers(size * n, of=rank, salt=f"step {step}") for rank in range(n)]
        total = torch.stack(given).sum(0)
        summed = true - lr * (0.9 * true_momentum + total)
        plain = true - lr * total / n
        true_momentum = 0.9 * true_momentum + total / n
        before, true = true, true - lr * true_momentum
        gradient = given[t.rank].clone()
        t.call(weights, gradient, momentum, lr, t.rank, n)
        known = {"the gradients are summed, not averaged?": summed}
        if step:
            known["without momentum"] = plain
        mine = slice(t.rank * size, (t.rank + 1) * size)
        only = before.clone()
        only[mine] = true[mine]
        known["only this rank's share is new"] = only
        t.equal(f"weights (step {step})", weights, true, before, known)
        mine_only = true_momentum.chunk(n)[t.rank]
        t.equal(f"momentum (step {step})", momentum, mine_only)


@EXERCISE.best
def best(world_size: int, size: int, lr: float) -> Cost:
    """Return a reduce-scatter and an all-gather, twice."""
    half = 4 * size * world_size * (world_size - 1) // world_size
    return Cost(4, 4 * half)
