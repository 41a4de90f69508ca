"""Wrong answers to `waiting_and_transfer`, and a piece of what each must be told."""

from tests.support.wrong_answers import told

# What a profiler of one rank shows.

# Transfer first.

# The two do not add up to the whole.

# The late rank is said to wait.

# Waiting alone.


@told("returned a NoneType, expected a list of pairs")
def returns_nothing(entered, ended):
    """No return."""
