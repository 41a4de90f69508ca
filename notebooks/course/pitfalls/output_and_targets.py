"""Targets at the wrong end: an exhibit of the museum of pitfalls."""

from __future__ import annotations

import math

import torch
from torch.nn.functional import cross_entropy

from course.pitfalls.base import Exhibit

EXHIBIT = Exhibit(
    wing="machines",
    title="Targets at the wrong end",
    story="""
    The network's output is on the second GPU, and one text sends the targets to the first. What
    does the loss say to that?
    """,
    choices=(
        "the target is moved",
        "an error: two devices",
    ),
    shows=2,
    kind="error",
    needs="2 GPUs",
)


@EXHIBIT.broken
def output_and_targets():
    output, target = (
        torch.ones(4, 2, device="cuda:1"),
        torch.zeros(4, dtype=torch.long, device="cuda:0"),
    )
    return cross_entropy(output, target)


@EXHIBIT.symptom
def symptom(seen):
    return "same device" in seen


@EXHIBIT.right
def right():
    """Send the targets to where the output is."""
    output, target = (
        torch.ones(4, 2, device="cuda:1"),
        torch.zeros(4, dtype=torch.long, device="cuda:0"),
    )
    loss = cross_entropy(output, target.to(output.device)).item()
    assert abs(loss - math.log(2)) < 1e-6
    return round(loss, 3)
