"""Wrong answers to `average_in_buckets`, and a piece of what each must be told."""

from course.exercises.average_in_buckets import EXERCISE
from tests.support.wrong_answers import WrongAnswers

WRONG = WrongAnswers(EXERCISE)

# No buckets.
WRONG.slip("one_by_one", "called all_reduce 6 times, expected 2", ("if size > room:", "if True:"))

# One bucket.
WRONG.slip("one_for_all", "a bucket holds 520 B, expected 400 B at most", ("if size > room:", "if not buckets:"))

# What is left after the loop.
WRONG.slip("forgets_the_last_bucket", "nothing has changed it", ("in buckets:", "in buckets[:-1]:"))

# No division.
WRONG.slip("sums", "summed, not averaged?", ("flat /= dist.get_world_size()", "pass"))

# A bucket is sent once it is too large.
WRONG.slip("looks_too_late", "a bucket holds", ("if size > room:", "if room <= 0:"))

# The means stay in the bucket.
WRONG.slip(
    "does_not_copy_back",
    "nothing has changed it",
    ("gradient.copy_(mean.view_as(gradient))", "gradient = mean.view_as(gradient)"),
)

# The bucket that is full first waits for the gradient that comes last.
WRONG.slip(
    "from_the_first_to_the_last",
    "backward makes the last gradient first",
    ("reversed(list(model.parameters()))", "model.parameters()"),
)
