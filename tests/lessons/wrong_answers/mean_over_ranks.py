"""Wrong answers to `mean_over_ranks`, and a piece of what each must be told."""

import torch
import torch.distributed as dist

from tests.support.wrong_answers import told

# No division.


@told("this rank's own value")
def own(value):
    """The result is thrown away."""
    dist.all_reduce(torch.tensor(value))
    return value


# No item().

# Nothing is returned.

# As if there were always two ranks.
