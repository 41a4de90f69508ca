"""Wrong answers to `ring_attention`, and a piece of what each must be told."""

from course.exercises.ring_attention import _gathered
from tests.support.wrong_answers import told


@told("this rank's keys and values only")
def stays_at_home(q, k, v, rank, world_size):
    """Local attention."""
    return _gathered(q, [k], [v])


# A mean of softmaxes.

# A sum of softmaxes.

# Sharper than asked for.


# The block may be overwritten before it was sent.
