"""Partitioned once."""

import torch
from torch.utils.data import DistributedSampler

from course.pitfalls.base import Exhibit, above, near

EXHIBIT = Exhibit(
    wing="data",
    title="Ten epochs, after one partition",
    story="""
    [*Writing Distributed Applications with
    PyTorch*](https://docs.pytorch.org/tutorials/intermediate/dist_tuto.html) gives each rank
    its part of the images at the start, for good. What share of all images does rank 0 see in
    ten epochs?
    """,
    choices=(
        "nearly all of them",
        "one part of them",
        "one image in ten",
    ),
    shows=2,
    gives=lambda world_size: near(1 / world_size, 0.01),
    expects=lambda world_size: above(1.5 / world_size),
)


@EXHIBIT.broken
def partitioned_once(world_size):
    part = torch.randperm(1000, generator=torch.Generator().manual_seed(1234)).tensor_split(
        world_size
    )[0]
    seen = {int(index) for epoch in range(10) for index in part}
    return len(seen) / 1000


@EXHIBIT.right
def right(world_size, seed):
    """A sampler shuffles all images before it distributes them: each rank gets different ones
    in each epoch. (All ranks together see every image either way, so averaged gradients hide
    the mistake; rank 0's BatchNorm statistics do not.)"""
    sampler = DistributedSampler(range(1000), world_size, 0, seed=seed)
    seen = set()
    for epoch in range(10):
        sampler.set_epoch(epoch)
        seen |= set(sampler)
    return len(seen) / 1000
