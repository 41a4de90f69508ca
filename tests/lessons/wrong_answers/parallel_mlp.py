"""Wrong answers to `parallel_mlp`, and a piece of what each must be told."""

import torch
import torch.distributed as dist

from course.exercises.parallel_mlp import EXERCISE
from tests.support.wrong_answers import WrongAnswers

WRONG = WrongAnswers(EXERCISE)

# Before the sum.
WRONG.slip(
    "adds_the_bias_everywhere",
    "the bias is added once on every rank",
    ("hidden @ second.T", "hidden @ second.T + bias"),
    ("return outputs + bias", "return outputs"),
)

# Linear.
WRONG.slip("no_relu", "the relu is missing", ("torch.relu(inputs @ first.T)", "inputs @ first.T"))

# Part of the sum.
WRONG.slip("no_communication", "this rank's hidden units only", ("dist.all_reduce(outputs)", "pass"))

# As for gradients.
WRONG.slip(
    "averages", "averaged, where the contributions add up", ("return outputs", "return outputs / dist.get_world_size()")
)


@WRONG("calls dist.all_gather, which this exercise does not allow")
def gathers_the_hidden_units(inputs, first, second, bias):
    """More than need be."""
    hidden = torch.relu(inputs @ first.T)
    parts = [torch.empty_like(hidden) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, hidden)
    return torch.cat(parts, 1) @ second.T + bias
