"""Random inputs, no seed."""

import torch

from course.pitfalls.base import Exhibit, OnEachRank

EXHIBIT = Exhibit(
    wing="data",
    title="torch.randn on every rank",
    story="""
    Each process of one text draws its inputs by `torch.randn`, without a seed. (`torch.seed()`
    puts the ranks into the state of a fresh process.) It runs twice: which ranks draw the same
    numbers again?
    """,
    choices=(
        "all of them",
        "rank 0",
        "none",
    ),
    shows=3,
    gives=OnEachRank(False),
    expects=OnEachRank(True),
)


@EXHIBIT.broken
def random_inputs(on_ranks):
    def unseeded(worker):
        torch.seed()
        return torch.randn(3).tolist()

    first, again = on_ranks(unseeded), on_ranks(unseeded)
    return [a == b for a, b in zip(first, again, strict=True)]


@EXHIBIT.right
def right(on_ranks, seed):
    """Give each rank its own generator, seeded by seed + rank: different on every rank, equal
    in every run."""

    def seeded(worker):
        own = torch.Generator().manual_seed(seed + worker.rank)
        return torch.randn(3, generator=own).tolist()

    first, again = on_ranks(seeded), on_ranks(seeded)
    assert first[0] != first[1]
    return [a == b for a, b in zip(first, again, strict=True)]
