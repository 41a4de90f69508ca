"""all_reduce and barrier, three times."""

import torch
import torch.distributed as dist

from course.pitfalls.base import Exhibit, OnEachRank

EXHIBIT = Exhibit(
    wing="gradients",
    title="all_reduce and barrier, three times",
    story="""
    A barrier after each `all_reduce`. Each rank contributes 1, three times. What is the total on
    each rank?
    """,
    choices=(
        "3",
        "3 times the number of ranks",
        "no total: a deadlock",
    ),
    shows=2,
    expects=lambda world_size: OnEachRank(3 * world_size),
    why="""
    A collective already waits for what it needs. The barriers are superfluous and cost time, but
    all ranks call them in the same order: no deadlock, and the same sums.
    """,
)


@EXHIBIT.sound
def one_more_barrier(on_ranks):
    def total(worker):
        ones = torch.ones(3)
        for one in ones:
            dist.all_reduce(one)
            dist.barrier()
        return ones.sum().item()

    return on_ranks(total)
