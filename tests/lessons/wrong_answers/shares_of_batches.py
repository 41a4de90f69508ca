"""Wrong answers to `shares_of_batches`, and a piece of what each must be told."""

import torch

from course.exercises.shares_of_batches import EXERCISE
from tests.support.wrong_answers import WrongAnswers

WRONG = WrongAnswers(EXERCISE)


@WRONG("has 6 samples over all ranks, expected 7")
def rounds_down(samples, batch_size, rank, world_size, epoch, seed):
    """`batch_size // world_size`, as published."""
    share = batch_size // world_size
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(seed + epoch)).tolist()
    whole = samples - samples % batch_size
    return [order[first + rank * share : first + (rank + 1) * share] for first in range(0, whole, batch_size)]


@WRONG("they differ by more")
def gives_the_rest_to_rank_0(samples, batch_size, rank, world_size, epoch, seed):
    """Rank 0 takes all that does not divide."""
    rest = batch_size % world_size
    share, skip = batch_size // world_size, 0 if rank == 0 else rest
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(seed + epoch)).tolist()
    whole = samples - samples % batch_size
    return [
        order[first + skip + rank * share : first + (rank + 1) * share + rest] for first in range(0, whole, batch_size)
    ]


# A last batch that is smaller.
WRONG.slip(
    "keeps_the_rest", "batches, expected 7 whole ones", ("range(0, whole, batch_size)", "range(0, samples, batch_size)")
)

# As without set_epoch.
WRONG.slip("forgets_the_epoch", "epochs 0 and 1 have the same order", ("seed + epoch", "seed"))

# The parts do not fit together.
WRONG.slip("shuffles_differently_on_each_rank", "is there twice", ("seed + epoch", "seed + epoch + 1000 * rank"))

# Ranks have drawn different random numbers before.
WRONG.slip(
    "uses_the_global_generator",
    "the same arguments gave other lists the second time",
    ("seed + epoch", "seed + epoch + torch.initial_seed()"),
)
