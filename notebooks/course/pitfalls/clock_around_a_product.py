"""A clock that does not wait."""

import time

import torch

from course.pitfalls.base import Exhibit, above, below

EXHIBIT = Exhibit(
    wing="machines",
    title="A clock around a matrix product",
    story="""
    [The text on ResNet-50 and
    SLURM](https://avoid.overfit.cn/post/67095b9014cb40888238b84fea17e872) reads the clock
    before and after a step on the GPU. How much of the time that a large matrix product
    takes does such a clock see?
    """,
    choices=(
        "all of it",
        "a small part",
    ),
    shows=2,
    gives=below(0.5),
    expects=above(0.9),
    needs="1 GPU",
)


def timed(x):
    """Seconds until the call returned, and until it was done."""
    x @ x  # the first call prepares
    torch.cuda.synchronize()
    began = time.perf_counter()
    x @ x
    returned = time.perf_counter() - began
    torch.cuda.synchronize()
    return returned, time.perf_counter() - began


@EXHIBIT.broken
def clock_around_a_product():
    x = torch.randn(8192, 8192, device="cuda")
    seen, waited = timed(x)
    return round(seen / waited, 3)


@EXHIBIT.right
def right():
    """A call on the GPU returns once its kernel is queued.
    `torch.cuda.synchronize()` waits until the GPU has finished."""
    x = torch.randn(8192, 8192, device="cuda")
    x @ x
    torch.cuda.synchronize()
    began = time.perf_counter()
    x @ x
    torch.cuda.synchronize()
    seen = time.perf_counter() - began
    torch.cuda.synchronize()
    waited = time.perf_counter() - began  # nothing is left to wait for
    return round(seen / waited, 3)
