"""Wrong answers to `ring_attention`, and a piece of what each must be told."""

from course.exercises.ring_attention import EXERCISE, _gathered
from tests.support.wrong_answers import WrongAnswers

WRONG = WrongAnswers(EXERCISE)


@WRONG("this rank's keys and values only")
def stays_at_home(q, k, v, rank, world_size):
    """Local attention."""
    return _gathered(q, [k], [v])


# A mean of softmaxes.
WRONG.slip(
    "averages_blocks",
    "every rank's block counts alike",
    ("mean * (total - both).exp() + (scores - both).exp()", "mean + scores.softmax(1)"),
    ("return mean", "return mean / world_size"),
)

# A sum of softmaxes.
WRONG.slip(
    "adds_blocks",
    "each block was normalised by itself, and then added",
    ("mean * (total - both).exp() + (scores - both).exp()", "mean + scores.softmax(1)"),
)

# Sharper than asked for.
WRONG.slip("forgets_the_scale", "not divided by the root of the width", (" / q.shape[1] ** 0.5", ""))


# The block may be overwritten before it was sent.
WRONG.slip("forgets_to_wait", "returned with an isend to rank", ("sending.wait()", "pass"))
