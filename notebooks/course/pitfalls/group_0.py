"""group=0: an exhibit of the museum of pitfalls."""

from __future__ import annotations

import torch
import torch.distributed as dist

from course.pitfalls.base import Exhibit

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
    kind="error",
)


@EXHIBIT.broken
def group_0(on_ranks):
    return on_ranks(lambda worker: dist.all_reduce(torch.ones(1), group=0))


@EXHIBIT.symptom
def symptom(seen):
    return "AttributeError: 'int' object has no attribute" in seen


@EXHIBIT.right
def right(on_ranks, world_size):
    """A group is an object, from `dist.new_group`. Leave it out, and all ranks are
    meant."""

    def total(worker):
        ones = torch.ones(1)
        dist.all_reduce(ones)
        return ones.item()

    sums = on_ranks(total)
    assert sums == [world_size] * world_size
    return sums
