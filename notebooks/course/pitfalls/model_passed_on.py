"""A model passed to processes."""

import torch
from torch import nn

from course.pitfalls.base import Exhibit, above
from course.pitfalls.helpers import flat

EXHIBIT = Exhibit(
    wing="learning",
    title="A model passed to processes",
    story="""
    One text passes its model to spawned processes. On a CPU, what does the parent's model do
    when a child writes to its own?
    """,
    choices=(
        "it stays as it is",
        "it changes too",
    ),
    shows=2,
    gives=above(0),
    expects=0,
)


@EXHIBIT.broken
def model_passed_on():
    model = nn.Linear(2, 1)
    before = flat(model.parameters()).clone()
    child = torch.multiprocessing.get_context("spawn").Process(
        target=nn.init.ones_, args=(model.weight,)
    )
    child.start()
    child.join(60)
    return (flat(model.parameters()) - before).abs().max().item()


@EXHIBIT.right
def right(on_ranks):
    """`torch.multiprocessing` moves CPU tensors to shared memory: all processes write to one
    model, in any order. (`.cuda()` in a child makes a copy.) `labkit` sends copies; lesson 02
    shares on purpose."""
    model = nn.Linear(2, 1)
    before = flat(model.parameters()).clone()
    assert set(on_ranks(lambda worker: nn.init.ones_(model.weight).sum().item())) == {2.0}
    return (flat(model.parameters()) - before).abs().max().item()
