"""One step more than the others: an exhibit of the museum of pitfalls."""

from __future__ import annotations

import torch
import torch.distributed as dist

import labkit
from course.pitfalls.base import Exhibit

EXHIBIT = Exhibit(
    wing="gradients",
    title="One step more than the others",
    story="""
    The parts of [*Writing Distributed Applications with
    PyTorch*](https://docs.pytorch.org/tutorials/intermediate/dist_tuto.html) need not be
    equally large. One rank has one batch more, and calls `all_reduce` once more. What
    becomes of that call?
    """,
    choices=(
        "the last call changes nothing",
        "it would wait, and is ended",
        "an error on the others",
    ),
    shows=2,
    kind="hang",
)


@EXHIBIT.broken
def one_step_more(world_size):
    def reduce(worker):
        for _ in range(4 if worker.rank == 0 else 3):
            dist.all_reduce(torch.ones(1))

    labkit.launch(reduce, world_size=world_size, backend="gloo", timeout_s=20, live=False)


@EXHIBIT.symptom
def symptom(seen):
    return "returned while rank 0 was still in " in seen


@EXHIBIT.right
def right(on_ranks, world_size):
    """Rank 0's call met nobody: without `labkit`, which saw the others return, it would
    have waited. Agree on the number of steps, or see lesson 14 for `Join`."""

    def reduce(worker):
        mine = torch.tensor(4 if worker.rank == 0 else 3)
        dist.all_reduce(mine, op=dist.ReduceOp.MIN)
        for _ in range(mine):
            dist.all_reduce(torch.ones(1))
        return mine.item()

    taken = on_ranks(reduce)
    assert taken == [3] * world_size
    return taken
