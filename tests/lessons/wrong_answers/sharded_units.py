"""Wrong answers to `sharded_units`, and a piece of what each must be told."""

from tests.support.wrong_answers import told


@told("forward of unit 0: its weight has no storage")
def gathers_nothing(units, shards):
    """No hooks."""


# The whole model is there after the first pass.

# Each for itself.

# Backward the next one is the one before.

# Nothing overlaps.

# Computes with what may not be there yet.

# No division.

# The rank's own part of its own gradient.

# As ZeRO-1 does.

# The first unit stays, for no other comes after it.
