"""Dividing a weight in place."""

import torch
from torch import nn

from course.pitfalls.base import Exhibit, below, has

EXHIBIT = Exhibit(
    wing="gradients",
    title="weight /= world_size",
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
    gives=has("leaf Variable that requires grad"),
    expects=below(1e-6),
    kind="error",
)


@EXHIBIT.broken
def dividing_in_place(world_size):
    weight = nn.Linear(2, 1).weight
    before = weight.detach().clone()
    weight /= world_size
    return (weight * world_size - before).abs().max().item()


@EXHIBIT.right
def right(world_size):
    """Autograd refuses to overwrite a leaf that requires a gradient. Change it under
    `torch.no_grad()`."""
    weight = nn.Linear(2, 1).weight
    before = weight.detach().clone()
    with torch.no_grad():
        weight /= world_size
    return (weight * world_size - before).abs().max().item()
