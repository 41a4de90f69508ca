"""Wrong answers to `mean_on_rank_0`, and a piece of what each must be told."""

import torch
import torch.distributed as dist

from course.exercises.mean_on_rank_0 import EXERCISE
from tests.support.wrong_answers import WrongAnswers

WRONG = WrongAnswers(EXERCISE)


@WRONG("a hang: rank 0 waits in all_reduce for the other ranks")
def as_it_was(value):
    """The hang."""
    if dist.get_rank() == 0:
        total = torch.tensor(value)
        dist.all_reduce(total)
        return total.item() / dist.get_world_size()
    return None


# No division.
WRONG.slip("sums", "the sum, not the mean", (" / dist.get_world_size()", ""))


@WRONG("rank 0's own value")
def asks_nobody(value):
    """No hang, and no mean."""
    return value if dist.get_rank() == 0 else None


# Everybody reports.
WRONG.slip("returns_everywhere", "expected None on all ranks but 0", ("if dist.get_rank() == 0:", "if True:"))


@WRONG("returned None, expected a float")
def nobody_returns(value):
    """No return."""
    dist.all_reduce(torch.tensor(value))
