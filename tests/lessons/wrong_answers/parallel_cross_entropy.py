"""Wrong answers to `parallel_cross_entropy`, and a piece of what each must be told."""

from course.exercises.parallel_cross_entropy import EXERCISE
from tests.support.wrong_answers import WrongAnswers

WRONG = WrongAnswers(EXERCISE)

# No greatest taken off.
WRONG.slip("overflows", "not a finite number", ("(logits - greatest[:, None]).exp()", "(10 * logits).exp()"))

# Two all-reduces.
WRONG.slip(
    "forgets_the_last_sum", "only the rank that has a target knows its logit", ("dist.all_reduce(picked)", "pass")
)

# Clamped, and not masked.
WRONG.slip("forgets_whose_it_is", "ranks that do not have the target's logit add another one", (" * is_mine", ""))

# As if there were no other ranks.
WRONG.slip(
    "no_communication",
    "this rank's part of the vocabulary only",
    ("dist.all_reduce(greatest, dist.ReduceOp.MAX)", "pass"),
    ("dist.all_reduce(total)", "pass"),
    ("dist.all_reduce(picked)", "pass"),
)
