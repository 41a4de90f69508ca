"""int(fraction × length)."""

import torch

from course.pitfalls.base import Exhibit

EXHIBIT = Exhibit(
    wing="data",
    title="60,000 images in equal parts",
    story="""
    [*Writing Distributed Applications with
    PyTorch*](https://docs.pytorch.org/tutorials/intermediate/dist_tuto.html) cuts 60,000
    images into equal parts of `int(1 / size * 60_000)` each. How many images are in no
    part, for 2 to 14 ranks?
    """,
    choices=(
        "none",
        "a few, for some numbers of ranks",
        "1 for each rank",
    ),
    shows=2,
    gives={2: 0, 4: 0, 7: 3, 8: 0, 9: 6, 14: 10},
    expects=dict.fromkeys((2, 4, 7, 8, 9, 14), 0),
)


@EXHIBIT.broken
def int_of_a_fraction():
    return {n: 60_000 - n * int(1.0 / n * 60_000) for n in (2, 4, 7, 8, 9, 14)}


@EXHIBIT.right
def right():
    """`tensor_split` distributes the remainder: some parts have one image more."""
    parts = {n: torch.arange(60_000).tensor_split(n) for n in (2, 4, 7, 8, 9, 14)}
    assert {len(part) for part in parts[7]} == {8571, 8572}
    return {n: 60_000 - sum(map(len, parts[n])) for n in parts}
