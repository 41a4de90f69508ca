"""Wrong answers to `mean_over_ranks`, and a piece of what each must be told."""

import torch
import torch.distributed as dist

from course.exercises.mean_over_ranks import EXERCISE
from tests.support.wrong_answers import WrongAnswers

WRONG = WrongAnswers(EXERCISE)

# No division.
WRONG.slip("sums", "summed, not averaged?", (" / dist.get_world_size()", ""))


@WRONG("this rank's own value")
def own(value):
    """The result is thrown away."""
    dist.all_reduce(torch.tensor(value))
    return value


# No item().
WRONG.slip("a_tensor", "returned a Tensor, expected a float", (".item()", ""))

# Nothing is returned.
WRONG.slip(
    "in_place", "returned a NoneType, expected a float: no return?", ("return total.item() / dist", "total /= dist")
)

# As if there were always two ranks.
WRONG.slip("always_two", "expected", ("dist.get_world_size()", "2"))
