"""find_unused_parameters=True."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import course
from course.pitfalls.base import Exhibit
from course.pitfalls.helpers import flat, part_of, spread, steps_of

EXHIBIT = Exhibit(
    wing="gradients",
    title="find_unused_parameters=True",
    story="""
    Each rank begins with different weights, and one of the parameters is never used. DDP is
    created with `find_unused_parameters=True`. How far apart are all parameters after five steps?
    """,
    choices=(
        "equal, bit for bit",
        "only the used ones are equal",
        "an error",
    ),
    shows=1,
    expects=0,
    why="""
    When it is created, DDP broadcasts all of rank 0's parameters, used or not. An unused one has
    no gradient, so no step changes it.
    """,
)


@EXHIBIT.sound
def unused_parameters(on_ranks, images, labels):
    def train(worker):
        torch.manual_seed(worker.rank)
        network = course.models.linear(images[0].numel())
        network.register_parameter("spare", nn.Parameter(torch.randn(3)))
        model = DistributedDataParallel(network, find_unused_parameters=True)
        steps_of(model, part_of(worker, images), part_of(worker, labels))
        return flat(model.parameters())

    return spread(on_ranks(train))
