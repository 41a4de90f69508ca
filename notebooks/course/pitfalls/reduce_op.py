"""reduce_op."""

import warnings

import torch.distributed as dist

from course.pitfalls.base import Exhibit, Expected

EXHIBIT = Exhibit(
    wing="gradients",
    title="dist.reduce_op.SUM",
    story="""
    [*Writing Distributed Applications with
    PyTorch*](https://docs.pytorch.org/tutorials/intermediate/dist_tuto.html) said
    `dist.reduce_op.SUM` for years. What does a current PyTorch do?
    """,
    choices=(
        "nothing",
        "a warning",
        "an error",
    ),
    shows=2,
    gives=Expected("a warning", lambda seen: "deprecated" in str(seen)),
    expects=[],
    kind="warning",
)


@EXHIBIT.broken
def reduce_op():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dist.reduce_op.SUM
    return [f"{w.category.__name__}: {w.message}" for w in caught]


@EXHIBIT.right
def right():
    """It is called `ReduceOp` now. A deprecation warning announces a future error."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dist.ReduceOp.SUM
    return [str(w.message) for w in caught]
