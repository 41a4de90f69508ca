"""DDP in name only."""

from torch import nn
from torch.nn.parallel import DistributedDataParallel

import course
from course.pitfalls.base import Exhibit, above
from course.pitfalls.helpers import flat, part_of, spread, steps_of

EXHIBIT = Exhibit(
    wing="gradients",
    title="Ranks, a group, a sampler and a wrapper",
    story="""
    The "DDP" example of one text starts ranks, joins a group, has a sampler, and wraps the
    model in `nn.DataParallel`; another text has processes, and no group at all. How far apart are
    the ranks' weights after five steps?
    """,
    choices=(
        "equal, bit for bit",
        "a rounding error",
        "not equal at all",
    ),
    shows=3,
    gives=above(0.01),
    expects=0,
)


@EXHIBIT.broken
def ddp_example(on_ranks, images, labels):
    def train(worker):
        model = nn.DataParallel(course.models.linear(images[0].numel()))
        steps_of(model, part_of(worker, images), part_of(worker, labels))
        return flat(model.parameters())

    return spread(on_ranks(train))  # the greatest difference to rank 0


@EXHIBIT.right
def right(on_ranks, images, labels):
    """`DataParallel` exchanges nothing between processes. `DistributedDataParallel` broadcasts rank
    0's weights at the start, and averages gradients over ranks."""

    def train(worker):
        model = DistributedDataParallel(course.models.linear(images[0].numel()))
        steps_of(model, part_of(worker, images), part_of(worker, labels))
        return flat(model.parameters())

    return spread(on_ranks(train))
