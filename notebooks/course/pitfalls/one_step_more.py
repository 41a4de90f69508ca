"""One step more than the others."""

import re

import torch
import torch.distributed as dist

import labkit
from course.pitfalls.base import Exhibit, Expected


def symptom(seen):
    failed_at_once = re.search("Connection (closed|reset) by peer", seen)
    return "returned while rank 0 was still in " in seen and bool(failed_at_once)


EXHIBIT = Exhibit(
    wing="gradients",
    title="One rank with one batch more",
    story="""
    [*Writing Distributed Applications with
    PyTorch*](https://docs.pytorch.org/tutorials/intermediate/dist_tuto.html) calls
    `all_reduce` once per parameter and batch. Its parts are equal only because `int` rounds
    each of them down. If the remainder is distributed, one rank may have one batch more, and
    call `all_reduce` once more, when the others have returned. What happens to that call, over
    gloo's connections on Linux?
    """,
    choices=(
        "it returns the rank's own number: the others add nothing",
        "it waits for the others until a timeout",
        "it fails at once: the others have closed their connections",
    ),
    shows=3,
    gives=Expected("a rank that waits for one that has returned", symptom),
    expects=Expected("equally many steps on each rank", lambda found: len(set(found)) == 1),
    kind="error",
    needs="Linux",
)


@EXHIBIT.broken
def one_step_more(world_size):
    def reduce(worker):
        for _ in range(4 if worker.rank == 0 else 3):
            dist.all_reduce(torch.ones(1))
        return 4 if worker.rank == 0 else 3

    options = {"world_size": world_size, "backend": "gloo", "stall_s": 20, "live": False}
    return labkit.launch(reduce, **options).results


@EXHIBIT.right
def right(on_ranks):
    """Gloo connects the ranks, and a rank that returns closes its connections. Over NCCL rank 0
    may wait until PyTorch's watchdog ends its process, by default after ten minutes. Agree on the number
    of steps, or use `Join`, as lesson 14c does."""

    def reduce(worker):
        mine = torch.tensor(4 if worker.rank == 0 else 3)
        dist.all_reduce(mine, op=dist.ReduceOp.MIN)
        for _ in range(mine):
            dist.all_reduce(torch.ones(1))
        return mine.item()

    return on_ranks(reduce)
