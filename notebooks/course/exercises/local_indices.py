"""Exercise: which samples are mine?"""

from __future__ import annotations

import random

import torch

from course.exercises.base import Exercise
from course.exercises.trial import Trial

EXERCISE = Exercise(
    lesson="04",
    title="Which samples are mine?",
    statement="""
    Return the indices of the samples that this rank sees in this epoch, as a list of `int`, without asking another
    rank.

    Over all ranks every sample is there, and all ranks have equally many: where `world_size` does not divide
    `samples`, some samples are there twice, as few as possible. Each epoch has another order, and so has each seed;
    the same arguments give the same list every time, whatever random numbers were drawn before.
    """,
    hints=(
        "All ranks must shuffle alike, so the shuffle must not depend on `rank`: a generator of its own, seeded "
        "from `seed` and `epoch`.",
        "`torch.randperm(samples, generator=torch.Generator().manual_seed(seed + epoch))` is such an order.",
        "Make it longer by repeating its beginning until `world_size` divides it; then take every "
        "`world_size`-th index.",
        "With fewer samples than ranks one repetition is not enough.",
    ),
    why="All ranks compute the same shuffled, padded list and each takes its own stride, so the shares fit "
    "together with no message sent.",
    world_sizes=(),
    imports=("import torch",),
    cases=tuple(
        {"samples": samples, "world_size": world_size} for samples in (12, 10, 101, 3, 1) for world_size in (1, 2, 3, 4)
    ),
)


@EXERCISE.reference
def local_indices(samples, rank, world_size, epoch, seed):
    """Return this rank's indices (0 … samples − 1) in this epoch, ⌈samples / world_size⌉ of them."""
    generator = torch.Generator().manual_seed(seed + epoch)
    order = torch.randperm(samples, generator=generator).tolist()
    padded = order * world_size
    total = (samples + world_size - 1) // world_size * world_size
    return padded[:total][rank::world_size]


def _shares(t: Trial, samples: int, world_size: int, epoch: int, seed: int) -> list[list[int]]:
    found = []
    for rank in range(world_size):
        share = t.call(samples, rank, world_size, epoch, seed)
        where = f"local_indices({samples}, {rank}, {world_size}, {epoch}, {seed})"
        t.require(isinstance(share, list), f"`{where}` is a {type(share).__name__}, expected a list")
        odd = [index for index in share if type(index) is not int]
        t.require(not odd, f"`{where}` holds a {type((odd or [0])[0]).__name__}, expected int")
        found.append(share)
    return found


@EXERCISE.trial
def trial(t: Trial, samples: int, world_size: int) -> None:
    """Call it for all ranks and look whether the shares fit together."""
    random.seed(1)
    torch.manual_seed(1)
    epochs = [_shares(t, samples, world_size, epoch, 7) for epoch in range(4)]
    each = -(-samples // world_size)
    for epoch, shares in enumerate(epochs):
        where = f"in epoch {epoch}"
        for rank, share in enumerate(shares):
            t.require(
                len(share) == each, f"rank {rank} has {len(share)} samples {where}, expected {each}, as all ranks"
            )
        seen = [index for share in shares for index in share]
        missing = sorted(set(range(samples)) - set(seen))
        t.require(not missing, f"sample {(missing or [0])[0]} is on no rank {where}")
        outside = sorted(set(seen) - set(range(samples)))
        t.require(not outside, f"index {(outside or [0])[0]} is not below samples ({samples})")
        often = max(seen.count(index) for index in set(seen))
        fair = -(-each * world_size // samples)
        t.require(often <= fair, f"a sample is there {often} times {where}, expected {fair} at most")
    if samples > 8:
        t.require(epochs[0] != epochs[1], "epochs 0 and 1 have the same order")
        whole = [sorted(epoch[0]) for epoch in epochs]
        same_share = world_size > 1 and all(share == whole[0] for share in whole)
        t.require(not same_share, "rank 0 has the same samples in every epoch: shuffle before you cut, not after")
        rising = len(epochs[0][0]) > 4 and sorted(epochs[0][0]) == epochs[0][0]
        t.require(not rising, "the samples of rank 0 come in rising order: not shuffled?")
        t.require(_shares(t, samples, world_size, 0, 8) != epochs[0], "another seed gives the same order")
    random.seed(2)
    torch.manual_seed(2)
    again = _shares(t, samples, world_size, 0, 7)
    t.require(
        again == epochs[0],
        "the same arguments gave another list the second time: it depends on random numbers drawn before",
    )
