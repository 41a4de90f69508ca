"""An image is not a row."""

import torch
from torch import nn

from course.pitfalls.base import Exhibit, has

EXHIBIT = Exhibit(
    wing="data",
    title="MNIST into Linear(784, 10)",
    story="""
    Batches of MNIST, (64, 1, 28, 28), go straight into `nn.Linear(784, 10)`. What comes out?
    """,
    choices=(
        "(64, 10)",
        "(64, 1, 28, 10)",
        "an error about shapes",
    ),
    shows=3,
    gives=has("1792x28 and 784x10"),
    expects=(64, 10),
    kind="error",
)


@EXHIBIT.broken
def images_into_linear():
    return nn.Linear(784, 10)(torch.zeros(64, 1, 28, 28)).shape


@EXHIBIT.right
def right():
    """`Linear` multiplies the last dimension, here a row of 28 pixels. Flatten all dimensions
    but the first, the batch."""
    logits = nn.Linear(784, 10)(torch.zeros(64, 1, 28, 28).flatten(1))
    return tuple(logits.shape)
