"""DDP in name only: an exhibit of the museum of pitfalls."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel

import course
from course.pitfalls.base import Exhibit
from course.pitfalls.helpers import flat, part_of, spread, steps_of

EXHIBIT = Exhibit(
    wing="gradients",
    title="DDP in name only",
    story="""
    The "DDP" example of one text starts ranks, joins a group, has a sampler, and wraps the
    model in `nn.DataParallel`; another starts processes that exchange nothing either. How far
    apart are the ranks' weights after five steps?
    """,
    choices=(
        "equal, bit for bit",
        "a rounding error",
        "not equal at all",
    ),
    shows=3,
    kind="wrong, in silence",
)


@EXHIBIT.broken
def ddp_example(on_ranks, images, labels):
    def train(worker):
        model = nn.DataParallel(course.models.linear(images[0].numel()))
        steps_of(model, part_of(worker, images), part_of(worker, labels))
        return flat(model.parameters())

    return spread(on_ranks(train))


@EXHIBIT.symptom
def symptom(seen):
    return seen > 0.01


@EXHIBIT.right
def right(on_ranks, images, labels):
    """Only `DistributedDataParallel` averages gradients over ranks, and sends rank 0's
    weights to all at the start."""

    def train(worker):
        model = DistributedDataParallel(course.models.linear(images[0].numel()))
        steps_of(model, part_of(worker, images), part_of(worker, labels))
        return flat(model.parameters())

    apart = spread(on_ranks(train))
    assert apart == 0
    return apart
