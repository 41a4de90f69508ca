"""Wrong answers to `step_and_break_even`, and a piece of what each must be told."""

from course.exercises.step_and_break_even import EXERCISE
from tests.support.wrong_answers import WrongAnswers

WRONG = WrongAnswers(EXERCISE)

# As if a sample could be cut.
WRONG.slip(
    "fractions_of_samples",
    "samples are whole, and the largest share decides",
    ("math.ceil(batch / ranks)", "batch / ranks"),
)

# A reduce-scatter only.
WRONG.slip("once_around", "a ring all-reduce has 2 (n − 1) messages", ("2 * (ranks - 1)", "(ranks - 1)"))

# As if all were hidden.
WRONG.slip(
    "the_longer_of_both",
    "nothing hides behind computing, so the two add up",
    ("math.ceil(batch / ranks) * sample_s + ring_s", "max(math.ceil(batch / ranks) * sample_s, ring_s)"),
)

# Over all ranks.
WRONG.slip("whole_batch", "that is the batch over all ranks", ("max(1, math.ceil", "ranks * max(1, math.ceil"))

# One too few.
WRONG.slip("too_few", "with so few, computing is shorter", ("max(1, math.ceil(ring", "max(1, math.floor(ring"))
