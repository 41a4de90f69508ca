"""A listing that nobody ran."""

import symtable

from course.pitfalls.base import Exhibit
from course.pitfalls.helpers import python

EXHIBIT = Exhibit(
    wing="starting",
    title="A listing with three mistakes",
    story="""
    One text shows a class that lost its indentation, an optimizer that is never made and a
    `world_size` that is never set. Run the listing in a fresh Python: how many of the three
    mistakes are you told about?
    """,
    choices=(
        "none",
        "one",
        "all three",
    ),
    shows=2,
    gives=["IndentationError"],
    expects=["IndentationError", "optimizer", "world_size"],
    kind="error",
)


LISTING = """
import torch
from torch import nn

class Model(nn.Module):
def forward(self, x):
    return x

weight = torch.ones(2)
optimizer.zero_grad()
weight /= world_size
"""


@EXHIBIT.broken
def three_mistakes():
    exit_code, said = python(LISTING)
    return [word for word in ("IndentationError", "optimizer", "world_size") if word in said]


@EXHIBIT.right
def right():
    """A run stops at the first mistake. A linter finds the others without running anything:
    this course's cells are checked by `ruff check`."""

    def undefined(text):
        names = symtable.symtable(text, "listing", "exec").get_symbols()
        return {
            name.get_name()
            for name in names
            if name.is_referenced() and not (name.is_assigned() or name.is_imported())
        }

    indented = LISTING.replace("def forward", "    def forward").replace("return x", "    return x")
    assert not undefined(f"optimizer, world_size = torch.optim.SGD([], 0.1), 2\n{indented}")
    return [python(LISTING)[1].split(":")[0], *sorted(undefined(indented))]
