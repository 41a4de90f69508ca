"""Wrong answers to `batch_norm_statistics`, and a piece of what each must be told."""

from typing import Any

import torch
import torch.distributed as dist

from tests.support.wrong_answers import told


def _sums(*values: Any) -> Any:
    """Return the sums over the ranks, all in one call."""
    sums = torch.cat([value.flatten() for value in values])
    dist.all_reduce(sums)
    return sums.split([value.numel() for value in values])


def _rows(x: Any) -> Any:
    return x.new_full((1,), len(x))


# The mean of the squares minus the square of the mean.

# Ranks count alike.

# Weighted, and yet wrong.

# BatchNorm normalises with the other.


@told("over this rank's rows only")
def on_its_own(x):
    """As BatchNorm under DDP."""
    return x.mean(0), x.var(0, unbiased=False)


# Half of the formula.
