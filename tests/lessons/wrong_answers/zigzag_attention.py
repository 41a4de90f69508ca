"""Wrong answers to `zigzag_attention`, and a piece of what each must be told."""

from course.exercises.zigzag_attention import _gathered, _positions
from tests.support.wrong_answers import told

# As in the exercise before.

# The wrong positions.


@told("this rank's keys and values only")
def stays_at_home(q, k, v, rank, world_size):
    """Local attention."""
    own = _positions(rank, world_size, len(q) // 2)
    return _gathered(q, k, v, own[:, None] >= own)


# All but itself; the first sees itself, or nothing would be left.

# A quotient of two zeros.
