"""Wrong answers to `parallel_mlp`, and a piece of what each must be told."""

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
