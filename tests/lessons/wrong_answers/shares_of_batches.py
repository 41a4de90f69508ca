"""Wrong answers to `shares_of_batches`, and a piece of what each must be told."""

import torch

from tests.support.wrong_answers import told


@told("has 6 samples over all ranks, expected 7")
def rounds_down(samples, batch_size, rank, world_size, epoch, seed):
    """`batch_size // world_size`, as published."""
    share = batch_size // world_size
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(seed + epoch)).tolist()
    whole = samples - samples % batch_size
    return [order[first + rank * share : first + (rank + 1) * share] for first in range(0, whole, batch_size)]


# A last batch that is smaller.

# As without set_epoch.

# The parts do not fit together.

# Ranks have drawn different random numbers before.
