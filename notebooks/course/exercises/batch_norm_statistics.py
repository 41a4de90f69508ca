"""Exercise: BatchNorm's statistics over ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from course.exercises.base import Cost, Exercise
from course.exercises.trial import Trial

EXERCISE = Exercise(
    lesson="08",
    title="BatchNorm's statistics over ranks",
    statement="""
    Return the mean and the variance of each feature over the rows of *all* ranks, as BatchNorm would
    find them in one process (the variance divides by the number of rows, not by one less). The number
    of rows differs from rank to rank. Use at most two collectives: two `dist.all_reduce` are enough, or
    one `dist.all_gather(list_of_tensors, tensor)`. Some inputs are 32-bit numbers that vary a little
    around 300: do not lose the variance in the rounding.
    """,
    hints=(
        "The mean of the ranks' variances misses how far the ranks' means lie apart.",
        "In 32 bits the mean of the squares minus the square of the mean is a small difference of two large numbers. "
        "Add up squares of differences from a mean.",
        "Much as SyncBatchNorm does: gather each rank's mean, variance and number of rows, in one tensor.",
        "A rank's squares around the common mean: rows × (its variance + (its mean − the common mean)²).",
    ),
    why="Around the common mean a rank's squares are rows × (variance + (mean − common mean)²): no two large numbers "
    "are subtracted, so no digits are lost.",
    allowed=("all_gather", "all_reduce"),
    cases=(
        {"rows": (3, 1, 5, 2), "features": 4},
        {"rows": (2, 2, 2, 2), "features": 1},
        {"rows": (1, 6, 2, 9), "features": 3},
        {"rows": (4, 6, 2, 9), "features": 2, "around": 300.0},
    ),
)


@EXERCISE.reference
def batch_norm_statistics(x):
    """Return (mean, variance), each (features,), over all ranks' rows. `x` is (rows, features), this rank's."""
    own = torch.cat([x.mean(0), x.var(0, unbiased=False), x.new_full((1,), len(x))])
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, own)
    ranks = torch.stack(gathered)
    means, variances, rows = ranks[:, : x.shape[1]], ranks[:, x.shape[1] : -1], ranks[:, -1:]
    mean = (rows * means).sum(0) / rows.sum()
    variance = (rows * (variances + (means - mean).square())).sum(0) / rows.sum()
    return mean, variance


@EXERCISE.trial
def trial(t: Trial, rows: tuple[int, ...], features: int, around: float = 0.0) -> None:
    """Call it, and compare with all rows in one tensor."""
    parts = [t.numbers(rows[rank], features, of=rank).double() for rank in range(t.world_size)]
    if around:
        parts = [(around + part / 50).float() for part in parts]
    x = parts[t.rank].clone()
    found = t.call(x)
    t.returned(found, "(mean, variance)")
    whole = torch.cat(parts).double()
    mean, variance = (value.to(x.dtype) for value in (whole.mean(0), whole.var(0, unbiased=False)))
    if around:
        t.equal("mean", found[0], mean)
        t.equal("variance", found[1], variance, None, _lost(found[1]), tolerance=1e-3)
    else:
        _check_exactly(t, found, rows, [part.double() for part in parts])
    t.unchanged("x", x, parts[t.rank])
    calls = t.traffic.count("all_reduce", "all_gather")
    t.require(calls <= 2, f"called {calls} collectives, expected two at most")


def _lost(variance: Any) -> dict[str, torch.Tensor] | None:
    """Say of any wrong variance in 32 bits what it must be, where the cases in 64 bits were right."""
    is_tensor = isinstance(variance, torch.Tensor)
    return (
        {"in 64 bits it was right, so digits were lost: are two large numbers subtracted?": variance}
        if is_tensor
        else None
    )


def _check_exactly(t: Trial, found: Any, rows: tuple[int, ...], parts: list[torch.Tensor]) -> None:
    """In 64 bits, where every known mistake can be told by its result."""
    whole = torch.cat(parts)
    means = torch.stack([part.mean(0) for part in parts])
    variances = torch.stack([part.var(0, unbiased=False) for part in parts])
    known = {
        "the mean of the ranks' means, though they have unequally many rows": means.mean(0),
        "over this rank's rows only": means[t.rank],
    }
    t.equal("mean", found[0], whole.mean(0), None, known)
    known = {"the mean square: the square of the mean is to be taken off": whole.square().mean(0)}
    if len(whole) > 1:
        known["divided by one row less"] = whole.var(0, unbiased=True)
    known["over this rank's rows only"] = variances[t.rank]
    weights = torch.tensor(rows[: t.world_size]).double()[:, None] / len(whole)
    known["the mean of the ranks' variances: it misses how far their means lie apart"] = (variances * weights).sum(0)
    t.equal("variance", found[1], whole.var(0, unbiased=False), None, known)


@EXERCISE.best
def best(world_size: int, rows: tuple[int, ...], features: int, around: float = 0.0) -> Cost:
    """Return one all-gather of means, variances and a count."""
    return Cost(1, (4 if around else 8) * (2 * features + 1) * (world_size - 1))
