"""Two layers that are one."""

import torch
from torch import nn

from course.pitfalls.base import Exhibit, above, below

EXHIBIT = Exhibit(
    wing="learning",
    title="Two Linear layers, on two GPUs",
    story="""
    To show model parallelism one text puts a `Linear` on each of two GPUs, and nothing between
    them. Is there a single `Linear` that computes the same?
    """,
    choices=(
        "yes, with fewer weights",
        "no",
    ),
    shows=1,
    gives=below(1e-09),
    expects=above(0.01),
)


@EXHIBIT.broken
def two_linear_layers():
    first, last = nn.Linear(8, 64).double(), nn.Linear(64, 3).double()
    one = nn.Linear(8, 3).double()
    one.weight.data = last.weight.data @ first.weight.data
    one.bias.data = last.weight.data @ first.bias.data + last.bias.data
    x = torch.randn(100, 8).double()
    return (last(first(x)) - one(x)).abs().max().item()


@EXHIBIT.right
def right():
    """The product of two matrices is a matrix. Put a nonlinearity between the layers."""
    first, last = nn.Linear(8, 64).double(), nn.Linear(64, 3).double()
    network, x = nn.Sequential(first, nn.ReLU(), last), torch.randn(100, 8).double()
    middle = (network(x) + network(-x)) / 2 - network(torch.zeros_like(x))
    return round(middle.abs().max().item(), 3)  # 0 for every Linear
