"""One seed for all ranks."""

import torch
from torch import nn

from course.pitfalls.base import Exhibit

EXHIBIT = Exhibit(
    wing="data",
    title="manual_seed(1234), and dropout",
    story="""
    [*Writing Distributed Applications with
    PyTorch*](https://docs.pytorch.org/tutorials/intermediate/dist_tuto.html) seeds every
    rank with 1234, so that all begin with the same weights. How many dropout masks are
    there?
    """,
    choices=(
        "one for all ranks",
        "one for each rank",
    ),
    shows=1,
    gives=1,
    expects=lambda world_size: world_size,
)


@EXHIBIT.broken
def one_seed_for_all(on_ranks):
    def kept(worker):
        torch.manual_seed(1234)
        return nn.functional.dropout(torch.ones(20), 0.5).bool().int().tolist()

    masks = on_ranks(kept)
    return len({tuple(mask) for mask in masks})


@EXHIBIT.right
def right(on_ranks):
    """Seed with seed + rank, and make the weights equal by broadcasting rank 0's. DDP does that
    when it is created; the tutorial, which has no DDP, would have to do it."""

    def kept(worker):
        torch.manual_seed(1234 + worker.rank)
        return nn.functional.dropout(torch.ones(20), 0.5).bool().int().tolist()

    masks = {tuple(mask) for mask in on_ranks(kept)}
    return len(masks)
