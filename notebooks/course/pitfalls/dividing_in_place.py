"""Dividing a weight in place: an exhibit of the museum of pitfalls."""

from __future__ import annotations

import torch
from torch import nn

from course.pitfalls.base import Exhibit

EXHIBIT = Exhibit(
    wing="gradients",
    title="Dividing a weight in place",
    story="""
    To average the weights over ranks, one text divides their sum: `weight /= world_size`.
    What does that do?
    """,
    choices=(
        "the weight is divided",
        "a copy is divided",
        "an error",
    ),
    shows=3,
    kind="error",
)


@EXHIBIT.broken
def dividing_in_place(world_size):
    weight = nn.Linear(2, 1).weight
    weight /= world_size
    return weight.shape


@EXHIBIT.symptom
def symptom(seen):
    return "leaf Variable that requires grad" in seen


@EXHIBIT.right
def right(world_size):
    """Autograd would lose track of what the gradient belongs to. Where no gradient is
    wanted, say so."""
    weight = nn.Linear(2, 1).weight
    before = weight.detach().clone()
    with torch.no_grad():
        weight /= world_size
    assert torch.allclose(weight * world_size, before)
    return "divided"
