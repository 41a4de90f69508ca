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
    [*Writing Distributed Applications with
    PyTorch*](https://docs.pytorch.org/tutorials/intermediate/dist_tuto.html) calls
    `all_reduce` once per parameter and batch. Its parts are equally large only because
    `int` cuts each of them. Deal out the remainder, and one rank may have one batch more,
    and call `all_reduce` once more, when the others have returned. Over gloo, what becomes
    of that call?
    """,
    choices=(
        "it gives the rank's own number: the others add nothing",
        "it waits for the others until a timeout",
        "it fails at once: the others have closed their connections",
    ),
    shows=3,
    kind="error",
)


@EXHIBIT.broken
def one_step_more(world_size):
    def reduce(worker):
        for _ in range(4 if worker.rank == 0 else 3):
            dist.all_reduce(torch.ones(1))

    labkit.launch(reduce, world_size=world_size, backend="gloo", stall_s=20, live=False)


@EXHIBIT.symptom
def symptom(seen):
    return "returned while rank 0 was still in " in seen


@EXHIBIT.right
def right(on_ranks, world_size):
    """Gloo's ranks are connected to each other, and a rank that returns closes its
    connections. Over NCCL nothing is closed: rank 0 would wait, and PyTorch's watchdog would
    end its process after ten minutes. Agree on the number of steps, or see lesson 14c for
    `Join`."""

    def reduce(worker):
        mine = torch.tensor(4 if worker.rank == 0 else 3)
        dist.all_reduce(mine, op=dist.ReduceOp.MIN)
        for _ in range(mine):
            dist.all_reduce(torch.ones(1))
        return mine.item()

    taken = on_ranks(reduce)
    assert taken == [3] * world_size
    return taken
