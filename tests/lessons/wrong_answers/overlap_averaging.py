"""Wrong answers to `overlap_averaging`, and a piece of what each must be told."""

import torch.distributed as dist

from tests.support.wrong_answers import told


@told("nothing overlaps")
def all_at_the_end(model):
    """After backward."""

    def finish() -> None:
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()

    return finish


# Right, but one after the other.

# The sum.

# What was begun in the first step is divided again in the second.
