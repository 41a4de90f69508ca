"""Wrong answers to `average_gradients`, and a piece of what each must be told."""

import torch.distributed as dist

from course.exercises.average_gradients import EXERCISE
from tests.support.wrong_answers import WrongAnswers

WRONG = WrongAnswers(EXERCISE)

# No division.
WRONG.slip("sums", "summed, not averaged?", ("parameter.grad /= dist.get_world_size()", "pass"))


@WRONG("the weights `0.weight` have changed")
def averages_the_weights(model):
    """The wrong tensor."""
    for parameter in model.parameters():
        parameter.data += 1.0
        dist.all_reduce(parameter.data)
        parameter.data /= dist.get_world_size()


@WRONG("raised AttributeError: 'NoneType' object has no attribute")
def takes_a_gradient_for_granted(model):
    """A parameter without one."""
    for parameter in model.parameters():
        total = parameter.grad.clone()
        dist.all_reduce(total)
        parameter.grad.copy_(total / dist.get_world_size())


# Right with two ranks only.
WRONG.slip(
    "divides_by_two", "1.5 times what it should be", ("parameter.grad /= dist.get_world_size()", "parameter.grad /= 2")
)

# The mean is thrown away.
WRONG.slip(
    "averages_a_copy",
    "nothing has changed it",
    ("all_reduce(parameter.grad)", "all_reduce(parameter.grad.clone())"),
    ("parameter.grad /= dist.get_world_size()", "pass"),
)

# A collective is everybody's.
WRONG.slip(
    "only_rank_0_calls",
    "a hang: rank 0 waits in all_reduce for the other ranks",
    ("is not None:", "is not None and dist.get_rank() == 0:"),
)

# Only matrices.
WRONG.slip("forgets_the_biases", "`0.bias.grad[0]` is", ("is not None:", "is not None and parameter.dim() > 1:"))
