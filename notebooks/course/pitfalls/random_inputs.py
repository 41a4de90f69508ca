"""Random inputs, no seed: an exhibit of the museum of pitfalls."""

from __future__ import annotations

import torch

from course.pitfalls.base import Exhibit

EXHIBIT = Exhibit(
    wing="data",
    title="Random inputs, no seed",
    story="""
    Each process of one text makes up its inputs with `torch.randn`, and nobody sets a seed
    (`torch.seed()` puts the ranks into the state of a fresh process). Run it twice: which
    ranks get the same numbers as before?
    """,
    choices=(
        "all of them",
        "rank 0",
        "none",
    ),
    shows=3,
    kind="wrong, in silence",
)


@EXHIBIT.broken
def random_inputs(on_ranks):
    def unseeded(worker):
        torch.seed()
        return torch.randn(3).tolist()

    first, again = on_ranks(unseeded), on_ranks(unseeded)
    return [a == b for a, b in zip(first, again, strict=True)]


@EXHIBIT.symptom
def symptom(seen, world_size):
    return seen == [False] * world_size


@EXHIBIT.right
def right(on_ranks, seed):
    """Give each rank a generator of its own, seeded by the rank: different on every rank,
    the same in every run."""

    def seeded(worker):
        own = torch.Generator().manual_seed(seed + worker.rank)
        return torch.randn(3, generator=own).tolist()

    first, again = on_ranks(seeded), on_ranks(seeded)
    assert first == again
    assert first[0] != first[1]
    return [a == b for a, b in zip(first, again, strict=True)]
