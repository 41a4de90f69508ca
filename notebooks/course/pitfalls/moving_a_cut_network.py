"""Moving a network that was cut."""

import torch
from torch import nn

from course.pitfalls.base import Exhibit, has

EXHIBIT = Exhibit(
    wing="machines",
    title="A network on two GPUs, and .to",
    story="""
    One text cuts a network in two, a half on each of two GPUs, and then moves all of it to
    the first, `.to("cuda:0")`. What does it compute then?
    """,
    choices=(
        "the second half stays",
        "an error: two devices",
    ),
    shows=2,
    gives=has("same device"),
    expects=(4, 2),
    kind="error",
    needs="2 GPUs",
)


class Cut(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(2, 2).to("cuda:0"), nn.Linear(2, 2).to("cuda:1")

    def forward(self, x):
        return self.last(self.first(x.to("cuda:0")).to("cuda:1"))


@EXHIBIT.broken
def moving_a_cut_network():
    return Cut().to("cuda:0")(torch.ones(4, 2)).shape


@EXHIBIT.right
def right():
    """Do not move a network that places its own parts. `DistributedDataParallel(model)` takes
    it as it is, without `device_ids`."""
    output = Cut()(torch.ones(4, 2))
    assert output.device == torch.device("cuda:1")
    return tuple(output.shape)
