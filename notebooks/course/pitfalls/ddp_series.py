"""A series that never trains."""

import torch
from torch import nn

from course.pitfalls.base import Exhibit, above
from course.pitfalls.helpers import flat, steps_of

EXHIBIT = Exhibit(
    wing="well_known",
    title="Linear(20, 1) and cross_entropy",
    story="""
    The code of PyTorch's own DDP series
    ([multigpu.py](https://github.com/pytorch/examples/blob/main/distributed/ddp-tutorial-series/multigpu.py))
    trains `nn.Linear(20, 1)` with `F.cross_entropy`. By how much do the weights move in ten
    steps?
    """,
    choices=(
        "by more than 0.01",
        "not at all",
        "until they are infinite",
    ),
    shows=2,
    gives=0,
    expects=above(0),
)


@EXHIBIT.broken
def ddp_series():
    model, x, y = nn.Linear(20, 1), torch.rand(32, 20), torch.rand(32, 1)
    before = flat(model.parameters()).clone()
    steps_of(model, x, y, steps=10)
    return (flat(model.parameters()) - before).abs().max().item()


@EXHIBIT.right
def right():
    """The softmax of a single output is always 1 and its logarithm 0, so loss and gradients are 0.
    Use another loss for one output, here the mean squared error."""
    model, x, y = nn.Linear(20, 1), torch.rand(32, 20), torch.rand(32, 1)
    before = flat(model.parameters()).clone()
    losses = []
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for _ in range(10):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    return round((flat(model.parameters()) - before).abs().max().item(), 3)
