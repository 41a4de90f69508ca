"""Weights in the optimizer's groups."""

import torch
from torch import nn

from course.pitfalls.base import Exhibit, Expected

EXHIBIT = Exhibit(
    wing="gradients",
    title='param_group["weight"]',
    story="""
    To "synchronise the optimizer" one text reads `param_group["weight"]`. What is there?
    """,
    choices=(
        "the layer's weight",
        "None",
        "a KeyError",
    ),
    shows=3,
    gives="KeyError: 'weight'",
    expects=Expected("the layer's weight, of shape (1, 2)", lambda found: found.shape == (1, 2)),
    kind="error",
)


@EXHIBIT.broken
def weights_in_groups():
    optimizer = torch.optim.SGD(nn.Linear(2, 1).parameters(), 0.1)
    return optimizer.param_groups[0]["weight"]


@EXHIBIT.right
def right():
    """A group has a list of parameters, `params`, and their settings. The optimizer's own state,
    such as momentum, is in `optimizer.state[parameter]`."""
    optimizer = torch.optim.SGD(nn.Linear(2, 1).parameters(), 0.1)
    weight, bias = optimizer.param_groups[0]["params"]
    assert bias.shape == (1,)
    return weight
