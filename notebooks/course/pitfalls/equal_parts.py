"""Equal parts of what does not divide: an exhibit of the museum of pitfalls."""

from __future__ import annotations

from torch.utils.data import DistributedSampler

from course.pitfalls.base import Exhibit

EXHIBIT = Exhibit(
    wing="data",
    title="Equal parts of what does not divide",
    story="""
    `DistributedSampler` gives all ranks equally many of 50,000 images. How many images come
    twice, at 3 and at 6 ranks?
    """,
    choices=(
        "none",
        "1 and 4",
        "3 and 6",
    ),
    shows=2,
    kind="wrong, in silence",
)


def twice(ranks, **options):
    samplers = [DistributedSampler(range(50_000), ranks, rank, **options) for rank in range(ranks)]
    drawn = [index for sampler in samplers for index in sampler]
    return len(drawn) - len(set(drawn))


@EXHIBIT.broken
def equal_parts():
    return {n: twice(n) for n in (3, 6)}


@EXHIBIT.symptom
def symptom(seen):
    return seen == {3: 1, 6: 4}


@EXHIBIT.right
def right():
    """It fills up with images from the beginning, which hardly matters in training. Where
    it does, `drop_last` leaves the remainder out: after `set_epoch`, other images in each
    epoch."""
    left_out = {n: twice(n, drop_last=True) for n in (3, 6)}
    assert left_out == {3: 0, 6: 0}
    return left_out
