"""Wrong answers to `mean_on_rank_0`, and a piece of what each must be told."""

import torch
import torch.distributed as dist

from tests.support.wrong_answers import told


@told("a hang: rank 0 waits in all_reduce for the other ranks")
def as_it_was(value):
    """The hang."""
    if dist.get_rank() == 0:
        total = torch.tensor(value)
        dist.all_reduce(total)
        return total.item() / dist.get_world_size()
    return None


# No division.


@told("rank 0's own value")
def asks_nobody(value):
    """No hang, and no mean."""
    return value if dist.get_rank() == 0 else None


# Everybody reports.


@told("returned None, expected a float")
def nobody_returns(value):
    """No return."""
    dist.all_reduce(torch.tensor(value))
