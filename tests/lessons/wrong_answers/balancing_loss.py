"""Wrong answers to `balancing_loss`, and a piece of what each must be told."""

from course.exercises.balancing_loss import EXERCISE
from tests.support.wrong_answers import WrongAnswers

WRONG = WrongAnswers(EXERCISE)

# Each rank balances by itself.
WRONG.slip("of_this_rank", "f of this rank's tokens only", ("dist.all_reduce(load)", "pass"))

# World size times too large.
WRONG.slip(
    "divides_by_its_own",
    "f was divided by this rank's tokens, and counts those of all",
    ("load / load.sum()", "load / len(logits)"),
)

# Not divided.
WRONG.slip("counts", "f is to be a share of the tokens, not their number", ("load / load.sum()", "load"))

# 1 / E if all is even.
WRONG.slip("not_times_experts", "and not yet times their number", ("return probabilities.shape[1] * ", "return "))

# Balances the probabilities, not the choices.
WRONG.slip(
    "squares", "f counts the likeliest", ("load / load.sum() * probabilities.mean(0)", "probabilities.mean(0).square()")
)

# Only a number.
WRONG.slip("without_gradient", "the loss has no gradient", ("logits.softmax(1)", "logits.detach().softmax(1)"))
