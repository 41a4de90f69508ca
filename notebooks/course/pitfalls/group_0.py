"""group=0."""

import torch
import torch.distributed as dist

from course.pitfalls.base import Exhibit, OnEachRank, has

EXHIBIT = Exhibit(
    wing="gradients",
    title="group=0",
    story="""
    An adaptation of [*Writing Distributed Applications with
    PyTorch*](https://docs.pytorch.org/tutorials/intermediate/dist_tuto.html) to newer
    versions has `dist.all_reduce(…, group=0)`. Which group is that?
    """,
    choices=(
        "the group of all ranks",
        "the group of rank 0",
        "an error",
    ),
    shows=3,
    gives=has("AttributeError: 'int' object has no attribute"),
    expects=lambda world_size: OnEachRank(world_size),
    kind="error",
)


@EXHIBIT.broken
def group_0(on_ranks):
    def total(worker):
        ones = torch.ones(1)
        dist.all_reduce(ones, group=0)
        return ones.item()

    return on_ranks(total)


@EXHIBIT.right
def right(on_ranks):
    """A group is an object, created by `dist.new_group`. The default is the group of all
    ranks."""

    def total(worker):
        ones = torch.ones(1)
        dist.all_reduce(ones)
        return ones.item()

    return on_ranks(total)
