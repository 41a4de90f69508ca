"""Wrong answers to `zero1_step`, and a piece of what each must be told."""

from course.exercises.zero1_step import EXERCISE
from tests.support.wrong_answers import WrongAnswers

WRONG = WrongAnswers(EXERCISE)

# No division.
WRONG.slip("sums", "the gradients are summed, not averaged?", ("mean /= world_size", "pass"))

# The others' weights stay old.
WRONG.slip(
    "does_not_gather",
    "only this rank's share is new",
    ("dist.all_gather_into_tensor(weights, share)", "weights.chunk(world_size)[rank].copy_(share)"),
)

# As without ZeRO.
WRONG.slip(
    "reduces_everything",
    "calls dist.all_reduce, which this exercise does not allow",
    ("dist.reduce_scatter_tensor(mean, gradient)", "dist.all_reduce(gradient)"),
)

# The optimizer forgets: seen in the second step.
WRONG.slip("plain_sgd", "without momentum", ("momentum.mul_(0.9).add_(mean)", "momentum.copy_(mean)"))

# A copy is updated.
WRONG.slip(
    "keeps_no_momentum",
    "`momentum (step 0)[0]` is 0",
    ("momentum.mul_(0.9).add_(mean)", "momentum = 0.9 * momentum + mean"),
)
