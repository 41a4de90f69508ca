"""Wrong answers to `local_indices`, and a piece of what each must be told."""

import random

from course.exercises.local_indices import EXERCISE, local_indices
from tests.support.wrong_answers import WrongAnswers

WRONG = WrongAnswers(EXERCISE)


@WRONG("is on no rank in epoch 0")
def drops_the_rest(samples, rank, world_size, epoch, seed):
    """No padding, but cut so that all are equally long."""
    share = local_indices(samples, rank, world_size, epoch, seed)
    return share[: samples // world_size] + share[:1] * (len(share) - samples // world_size)


# Unequal shares: DDP hangs at the end of the epoch.
WRONG.slip("does_not_pad", "has 3 samples in epoch 0, expected 4", ("padded[:total]", "order"))

# As without set_epoch.
WRONG.slip("forgets_the_epoch", "epochs 0 and 1 have the same order", ("seed + epoch", "seed"))

# The shares do not fit together.
WRONG.slip("shuffles_differently_on_each_rank", "is on no rank", ("seed + epoch", "seed + epoch + 1000 * rank"))

# Ranks have drawn different random numbers before.
WRONG.slip(
    "uses_the_global_generator",
    "the same arguments gave another list the second time",
    ("seed + epoch", "seed + epoch + torch.initial_seed()"),
)


@WRONG("rank 0 has the same samples in every epoch: shuffle before you cut")
def cuts_before_it_shuffles(samples, rank, world_size, epoch, seed):
    """Each rank sees its own samples only, for ever."""
    total = -(-samples // world_size) * world_size
    share = [index % samples for index in range(total)][rank::world_size]
    random.Random(seed + epoch).shuffle(share)
    return share


# No int.
WRONG.slip(
    "returns_tensors",
    "holds a Tensor, expected int",
    ("padded[:total][rank::world_size]", "list(torch.tensor(padded[:total][rank::world_size]))"),
)

# Fewer samples than ranks.
WRONG.slip(
    "pads_once",
    "samples=1, world_size=3: rank 2 has 0 samples",
    ("order * world_size", "order + order[: -samples % world_size]"),
)
