"""Wrong answers to `zigzag_attention`, and a piece of what each must be told."""

from course.exercises.zigzag_attention import EXERCISE, _gathered, _positions
from tests.support.wrong_answers import WrongAnswers

WRONG = WrongAnswers(EXERCISE)

# As in the exercise before.
WRONG.slip(
    "not_causal", "every query sees every key", ("scores.masked_fill(keys > queries[:, None], -torch.inf)", "scores")
)

# The wrong positions.
WRONG.slip(
    "in_order",
    "masked as if the sequence were cut in order",
    ("pieces[rank], pieces[-1 - rank]", "pieces[2 * rank], pieces[2 * rank + 1]"),
)


@WRONG("this rank's keys and values only")
def stays_at_home(q, k, v, rank, world_size):
    """Local attention."""
    own = _positions(rank, world_size, len(q) // 2)
    return _gathered(q, k, v, own[:, None] >= own)


# All but itself; the first sees itself, or nothing would be left.
WRONG.slip(
    "strictly_before",
    "a query does not see its own position",
    ("keys > queries[:, None], -torch.inf", "(keys >= queries[:, None]) & (keys > 0), -1e9"),
)

# A quotient of two zeros.
WRONG.slip("own_block_last", "has a query seen nothing yet?", ("keys > queries", "keys >= queries"))
