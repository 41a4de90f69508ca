"""Exercise: BatchNorm's statistics over ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from course.exercises.base import Cost, Exercise
from course.exercises.trial import Trial

EXERCISE = Exercise(
    lesson="12",
    title="BatchNorm's statistics over ranks",
    statement="""
    Return the mean and the variance of each feature over the rows of *all* ranks, as BatchNorm would find them in one
    process (the variance divides by the number of rows, not by one less). The number of rows differs from rank to
    rank. A single `dist.all_reduce`.
    """,
    hints=(
        "The mean of the ranks' variances misses how far the ranks' means lie apart.",
        "The variance is the mean of the squares minus the square of the mean; sums of rows and of squares can "
        "be added up.",
        "Three things travel in one tensor: the sums, the sums of squares, and the number of rows.",
    ),
    why="Sums, sums of squares and counts add up over ranks; means and variances do not.",
    allowed=("all_reduce",),
    cases=(
        {"rows": (3, 1, 5, 2), "features": 4},
        {"rows": (2, 2, 2, 2), "features": 1},
        {"rows": (1, 6, 2, 9), "features": 3},
    ),
)


@EXERCISE.reference
def batch_norm_statistics(x):
    """Return (mean, variance), each (features,), over all ranks' rows. `x` is (rows, features), this rank's."""
    rows = x.new_full((1,), len(x))
    sums = torch.cat([x.sum(0), x.square().sum(0), rows])
    dist.all_reduce(sums)
    mean, square = sums[:-1].view(2, -1) / sums[-1]
    return mean, square - mean.square()


@EXERCISE.trial
def trial(t: Trial, rows: tuple[int, ...], features: int) -> None:
    """Call it, and compare with all rows in one tensor."""
    parts = [t.numbers(rows[rank], features, of=rank).double() for rank in range(t.world_size)]
    x = parts[t.rank].clone()
    found = t.call(x)
    is_pair = isinstance(found, (tuple, list)) and len(found) == 2
    t.require(is_pair, f"returned a {type(found).__name__}, expected (mean, variance)")
    whole = torch.cat(parts)
    means = torch.stack([part.mean(0) for part in parts])
    variances = torch.stack([part.var(0, unbiased=False) for part in parts])
    known = {
        "the mean of the ranks' means, though they have unequally many rows": means.mean(0),
        "over this rank's rows only": means[t.rank],
    }
    t.equal("mean", found[0], whole.mean(0), None, known if t.world_size > 1 else None)
    known = {"the mean square: the square of the mean is to be taken off": whole.square().mean(0)}
    if len(whole) > 1:
        known["divided by one row less"] = whole.var(0, unbiased=True)
    if t.world_size > 1:
        known["over this rank's rows only"] = variances[t.rank]
        weights = torch.tensor(rows[: t.world_size]).double()[:, None] / len(whole)
        known["the mean of the ranks' variances: it misses how far their means lie apart"] = (variances * weights).sum(
            0
        )
    t.equal("variance", found[1], whole.var(0, unbiased=False), None, known)
    t.unchanged("x", x, parts[t.rank])
    calls = t.traffic.count("all_reduce")
    t.require(calls <= 1, f"called all_reduce {calls} times, expected once")


@EXERCISE.best
def best(world_size: int, rows: tuple[int, ...], features: int) -> Cost:
    """Return sums, squares and a count, of 8 bytes each."""
    return Cost(1, 8 * (2 * features + 1) * (world_size - 1) // world_size * 2)


@EXERCISE.wrong("the mean of the ranks' means")
def mean_of_means(x: Any) -> Any:
    """Ranks count alike."""
    sums = torch.stack([x.mean(0), x.square().mean(0)])
    dist.all_reduce(sums)
    mean, square = sums / dist.get_world_size()
    return mean, square - mean.square()


@EXERCISE.wrong("it misses how far their means lie apart")
def mean_of_variances(x: Any) -> Any:
    """Weighted, and yet wrong."""
    rows = x.new_full((1,), len(x))
    sums = torch.cat([x.sum(0), x.var(0, unbiased=False) * len(x), rows])
    dist.all_reduce(sums)
    mean, variance = sums[:-1].view(2, -1) / sums[-1]
    return mean, variance


@EXERCISE.wrong("divided by one row less")
def unbiased(x: Any) -> Any:
    """BatchNorm normalises with the other."""
    mean, variance = batch_norm_statistics(x)
    rows = torch.tensor(float(len(x)))
    dist.all_reduce(rows)
    return mean, variance * rows / (rows - 1)


@EXERCISE.wrong("over this rank's rows only")
def on_its_own(x: Any) -> Any:
    """As BatchNorm under DDP."""
    return x.mean(0), x.var(0, unbiased=False)


@EXERCISE.wrong("the square of the mean is to be taken off")
def mean_square(x: Any) -> Any:
    """Half of the formula."""
    mean, variance = batch_norm_statistics(x)
    return mean, variance + mean.square()


@EXERCISE.wrong("called all_reduce 2 times, expected once")
def two_calls(x: Any) -> Any:
    """Right, and twice as slow."""
    dist.all_reduce(x.sum(0))
    return batch_norm_statistics(x)
