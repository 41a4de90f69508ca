"""Wrong answers to `bubble`, and a piece of what each must be told."""

from course.exercises.bubble import EXERCISE
from tests.support.wrong_answers import WrongAnswers

WRONG = WrongAnswers(EXERCISE)

# Relative to the ideal time.
WRONG.slip(
    "over_the_work",
    "that is waiting over working, not over the whole",
    ("(micro_batches + stages - 1)", "micro_batches"),
)

# The efficiency.
WRONG.slip("the_rest", "that is the share in which it works", ("return (stages - 1)", "return micro_batches"))

# One stage too many.
WRONG.slip("off_by_one", "one tick too many waited", ("return (stages - 1)", "return stages"))

# As for one micro-batch.
WRONG.slip("without_micro_batches", "it is 0.75, expected 0.3333", ("(micro_batches + stages - 1)", "stages"))
