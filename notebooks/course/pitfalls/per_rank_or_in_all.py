"""64, per rank or in all: an exhibit of the museum of pitfalls."""

from __future__ import annotations

from torch.utils.data import DataLoader, DistributedSampler

from course.pitfalls.base import Exhibit

EXHIBIT = Exhibit(
    wing="data",
    title="64, per rank or in all?",
    story="""
    One text compares `DataParallel` with its distributed form, both with `batch_size=64` and
    one learning rate. How many images are in a step of each, with 4 GPUs?
    """,
    choices=(
        "64 and 64",
        "64 and 256",
        "256 and 256",
    ),
    shows=2,
    kind="wrong, in silence",
)


@EXHIBIT.broken
def per_rank_or_in_all():
    one_loader = next(iter(DataLoader(range(1200), 64)))
    four_loaders = [
        DataLoader(range(1200), 64, sampler=DistributedSampler(range(1200), 4, r)) for r in range(4)
    ]
    return len(one_loader), sum(len(next(iter(loader))) for loader in four_loaders)


@EXHIBIT.symptom
def symptom(seen):
    return seen == (64, 256)


@EXHIBIT.right
def right():
    """`DataParallel` cuts one batch up; ranks have a batch each. Give the batch over all
    ranks the same size before you compare."""
    loaders = [
        DataLoader(range(1200), 64 // 4, sampler=DistributedSampler(range(1200), 4, r))
        for r in range(4)
    ]
    total = sum(len(next(iter(loader))) for loader in loaders)
    assert total == 64
    return total
