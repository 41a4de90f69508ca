"""Wrong answers to `batch_norm_statistics`, and a piece of what each must be told."""

from typing import Any

import torch
import torch.distributed as dist

from course.exercises.batch_norm_statistics import EXERCISE
from tests.support.wrong_answers import WrongAnswers

WRONG = WrongAnswers(EXERCISE)


def _sums(*values: Any) -> Any:
    """Return the sums over the ranks, all in one call."""
    sums = torch.cat([value.flatten() for value in values])
    dist.all_reduce(sums)
    return sums.split([value.numel() for value in values])


def _rows(x: Any) -> Any:
    return x.new_full((1,), len(x))


# The mean of the squares minus the square of the mean.
WRONG.slip(
    "by_squares",
    "are two large numbers subtracted?",
    ("(means - mean).square()", "means.square()"),
    ("return mean, variance", "return mean, variance - mean.square()"),
)

# Ranks count alike.
WRONG.slip("mean_of_means", "the mean of the ranks' means", ("(rows * means).sum(0) / rows.sum()", "means.mean(0)"))

# Weighted, and yet wrong.
WRONG.slip(
    "mean_of_variances", "it misses how far their means lie apart", ("variances + (means - mean).square()", "variances")
)

# BatchNorm normalises with the other.
WRONG.slip(
    "unbiased", "divided by one row less", (".square())).sum(0) / rows.sum()", ".square())).sum(0) / (rows.sum() - 1)")
)


@WRONG("over this rank's rows only")
def on_its_own(x):
    """As BatchNorm under DDP."""
    return x.mean(0), x.var(0, unbiased=False)


# Half of the formula.
WRONG.slip(
    "mean_square",
    "the square of the mean is to be taken off",
    ("return mean, variance", "return mean, variance + mean.square()"),
)
