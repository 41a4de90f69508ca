"""Wrong answers to `waiting_and_transfer`, and a piece of what each must be told."""

from course.exercises.waiting_and_transfer import EXERCISE
from tests.support.wrong_answers import WrongAnswers

WRONG = WrongAnswers(EXERCISE)

# What a profiler of one rank shows.
WRONG.slip("all_is_transfer", "nobody has waited here", ("full - came, went - full", "0.0, went - came"))

# Transfer first.
WRONG.slip("swapped", "the other way round", ("full - came, went - full", "went - full, full - came"))

# The two do not add up to the whole.
WRONG.slip("counts_twice", "transfer begins when the last rank has come", ("went - full", "went - came"))

# The late rank is said to wait.
WRONG.slip(
    "since_the_first",
    "it is the last rank that waits for nobody, not the first",
    ("full - came, went - full", "came - min(entered), went - came"),
)

# Waiting alone.
WRONG.slip("one_number", "expected a pair", ("(full - came, went - full)", "full - came"))


@WRONG("returned a NoneType, expected a list of pairs")
def returns_nothing(entered, ended):
    """No return."""
