"""Wrong answers to `outer_step`, and a piece of what each must be told."""

from course.exercises.outer_step import EXERCISE
from tests.support.wrong_answers import WrongAnswers

WRONG = WrongAnswers(EXERCISE)

# The sign.
WRONG.slip("goes_uphill", "the step goes the other way", ("start - local", "local - start"))

# No division.
WRONG.slip("sums", "the differences are summed, not averaged", ("gradient /= dist.get_world_size()", "pass"))

# As SGD(momentum=…).
WRONG.slip(
    "plain_momentum", "that is momentum without Nesterov's look ahead", ("(gradient + momentum * velocity)", "velocity")
)

# No communication.
WRONG.slip(
    "each_for_itself",
    "that is this rank's own difference, not the average",
    ("dist.all_reduce(gradient)", "pass"),
    ("gradient /= dist.get_world_size()", "pass"),
)

# The old one is returned.
WRONG.slip(
    "forgets_the_velocity",
    "that is the velocity before the round",
    ("velocity = momentum", "new = momentum"),
    ("momentum * velocity), velocity", "momentum * new), velocity"),
)

# Overwrites what the others compare with.
WRONG.slip(
    "in_place",
    "`start` was changed",
    ("start - lr * (gradient + momentum * velocity)", "start.sub_(lr * (gradient + momentum * velocity))"),
)

# Half of the answer.
WRONG.slip("weights_only", "returned a Tensor, expected (weights, velocity)", ("velocity), velocity", "velocity)"))
