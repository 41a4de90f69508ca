"""reduce_op: an exhibit of the museum of pitfalls."""

from __future__ import annotations

import warnings

import torch.distributed as dist

from course.pitfalls.base import Exhibit

EXHIBIT = Exhibit(
    wing="gradients",
    title="reduce_op",
    story="""
    [*Writing Distributed Applications with
    PyTorch*](https://docs.pytorch.org/tutorials/intermediate/dist_tuto.html) said
    `dist.reduce_op.SUM` for years. What does a new PyTorch say to it?
    """,
    choices=(
        "nothing",
        "a warning",
        "an error",
    ),
    shows=2,
    kind="warning",
)


@EXHIBIT.broken
def reduce_op():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dist.reduce_op.SUM
    return [f"{w.category.__name__}: {w.message}" for w in caught]


@EXHIBIT.symptom
def symptom(seen):
    return "deprecated" in str(seen)


@EXHIBIT.right
def right():
    """It is called `ReduceOp` now. A warning that nobody reads is an error that comes
    later."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dist.ReduceOp.SUM
    assert not caught
    return "no warning"
