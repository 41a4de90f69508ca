"""Weights in the optimizer's groups: an exhibit of the museum of pitfalls."""

from __future__ import annotations

import torch
from torch import nn

from course.pitfalls.base import Exhibit

EXHIBIT = Exhibit(
    wing="gradients",
    title="Weights in the optimizer's groups",
    story="""
    To "synchronise the optimizer" one text reads `param_group["weight"]`. What is there?
    """,
    choices=(
        "the layer's weight",
        "None",
        "a KeyError",
    ),
    shows=3,
    kind="error",
)


@EXHIBIT.broken
def weights_in_groups():
    optimizer = torch.optim.SGD(nn.Linear(2, 1).parameters(), 0.1)
    return optimizer.param_groups[0]["weight"]


@EXHIBIT.symptom
def symptom(seen):
    return seen == "KeyError: 'weight'"


@EXHIBIT.right
def right():
    """A group has a list of parameters and the settings for them, no names."""
    optimizer = torch.optim.SGD(nn.Linear(2, 1).parameters(), 0.1)
    shapes = [tuple(parameter.shape) for parameter in optimizer.param_groups[0]["params"]]
    assert shapes == [(1, 2), (1,)]
    return shapes
