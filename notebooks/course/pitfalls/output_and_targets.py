"""Targets at the wrong end."""

import math

import torch
from torch.nn.functional import cross_entropy

from course.pitfalls.base import Exhibit, has, near

EXHIBIT = Exhibit(
    wing="machines",
    title="Output and targets",
    story="""
    The network's output is on the second GPU, and one text sends the targets to the first. What
    does `cross_entropy` do?
    """,
    choices=(
        "the target is moved",
        "an error: two devices",
    ),
    shows=2,
    gives=has("same device"),
    expects=near(math.log(2)),
    kind="error",
    needs="2 GPUs",
)


@EXHIBIT.broken
def output_and_targets():
    output, target = (
        torch.ones(4, 2, device="cuda:1"),
        torch.zeros(4, dtype=torch.long, device="cuda:0"),
    )
    return cross_entropy(output, target).item()


@EXHIBIT.right
def right():
    """Move the targets to the output's device."""
    output, target = (
        torch.ones(4, 2, device="cuda:1"),
        torch.zeros(4, dtype=torch.long, device="cuda:0"),
    )
    return cross_entropy(output, target.to(output.device)).item()
