"""Exercise: this rank's part of every batch, also where the ranks do not divide it."""

from __future__ import annotations

import torch

from course.exercises.base import Exercise
from course.exercises.trial import Trial

EXERCISE = Exercise(
    lesson="16",
    title="A batch that the ranks do not divide",
    statement="""
    Return this rank's samples in each batch of an epoch: a list with a list of `int` for each batch. Over all ranks a
    batch has exactly `batch_size` samples, also where `world_size` does not divide it; the ranks' parts differ by one
    sample at most. No sample is there twice in an epoch, and what is left after the last whole batch is left out.
    Each epoch has another order, and so has each seed; the same arguments give the same lists every time, whatever
    random numbers were drawn before. No rank is asked.
    """,
    hints=(
        "All ranks must shuffle alike: a generator of its own, seeded from `seed` and `epoch`, as in lesson 04.",
        "Cut the order into batches first, and each batch into parts then.",
        "Rank r's part of a batch may begin at `batch_size * r // world_size` and end where rank r + 1's begins.",
    ),
    why="The parts of a batch end where the next rank's begin, so they add up to the batch for any number of ranks.",
    world_sizes=(),
    imports=("import torch",),
    cases=tuple(
        {"samples": samples, "batch_size": batch_size, "world_size": world_size}
        for samples, batch_size in ((24, 12), (50, 7), (31, 5))
        for world_size in (1, 2, 3, 4)
    ),
)


@EXERCISE.reference
def shares_of_batches(samples, batch_size, rank, world_size, epoch, seed):
    """Return a list of lists of int, one a whole batch: the samples (0 … samples − 1) that this rank takes."""
    generator = torch.Generator().manual_seed(seed + epoch)
    order = torch.randperm(samples, generator=generator).tolist()
    begin = batch_size * rank // world_size
    end = batch_size * (rank + 1) // world_size
    whole = samples - samples % batch_size
    return [order[first + begin : first + end] for first in range(0, whole, batch_size)]


def _of_all(t: Trial, samples: int, batch_size: int, world_size: int, epoch: int, seed: int) -> list[list[list[int]]]:
    """Return what each rank takes, by rank and batch."""
    found = []
    for rank in range(world_size):
        shares = t.call(samples, batch_size, rank, world_size, epoch, seed)
        where = f"shares_of_batches({samples}, {batch_size}, {rank}, {world_size}, {epoch}, {seed})"
        are_lists = isinstance(shares, list) and all(isinstance(share, list) for share in shares)
        t.require(are_lists, f"`{where}` is no list of lists")
        odd = [index for share in shares for index in share if type(index) is not int]
        t.require(not odd, f"`{where}` holds a {type((odd or [0])[0]).__name__}, expected int")
        count = samples // batch_size
        t.require(len(shares) == count, f"`{where}` has {len(shares)} batches, expected {count} whole ones")
        found.append(shares)
    return found


@EXERCISE.trial
def trial(t: Trial, samples: int, batch_size: int, world_size: int) -> None:
    """Call it for all ranks and look whether the parts make up the batches."""
    torch.manual_seed(1)
    epochs = [_of_all(t, samples, batch_size, world_size, epoch, 7) for epoch in range(4)]
    for epoch, by_rank in enumerate(epochs):
        for batch, parts in enumerate(zip(*by_rank, strict=True)):
            sizes = [len(part) for part in parts]
            where = f"batch {batch} of epoch {epoch}"
            t.require(
                sum(sizes) == batch_size, f"{where} has {sum(sizes)} samples over all ranks, expected {batch_size}"
            )
            t.require(max(sizes) - min(sizes) <= 1, f"the ranks' parts of {where} are {sizes}: they differ by more")
        seen = [index for shares in by_rank for share in shares for index in share]
        outside = sorted(set(seen) - set(range(samples)))
        t.require(not outside, f"index {(outside or [0])[0]} is not below samples ({samples})")
        twice = sorted({index for index in seen if seen.count(index) > 1})
        t.require(not twice, f"sample {(twice or [0])[0]} is there twice in epoch {epoch}")
    t.require(epochs[0] != epochs[1], "epochs 0 and 1 have the same order")
    whole = [{index for share in epoch[0] for index in share} for epoch in epochs]
    is_cut_first = world_size > 1 and all(share == whole[0] for share in whole)
    t.require(not is_cut_first, "rank 0 has the same samples in every epoch: shuffle before you cut, not after")
    taken = [index for share in epochs[0][0] for index in share]
    t.require(taken != sorted(taken), "the samples of rank 0 come in rising order: not shuffled?")
    t.require(_of_all(t, samples, batch_size, world_size, 0, 8) != epochs[0], "another seed gives the same order")
    torch.manual_seed(2)
    t.require(
        _of_all(t, samples, batch_size, world_size, 0, 7) == epochs[0],
        "the same arguments gave other lists the second time: they depend on random numbers drawn before",
    )
