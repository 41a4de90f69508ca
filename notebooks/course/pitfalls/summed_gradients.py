"""A sum is not a mean."""

import torch.distributed as dist
from torch.nn.functional import cross_entropy

from course.pitfalls.base import Exhibit, near
from course.pitfalls.helpers import flat, part_of

EXHIBIT = Exhibit(
    wing="gradients",
    title="all_reduce of the gradients",
    story="""
    One text warns that `all_reduce` may make gradients explode. How many times as long as the
    whole batch's gradient is this one?
    """,
    choices=(
        "as long",
        "as many times as there are ranks",
        "it depends on the data",
    ),
    shows=2,
    gives=lambda world_size: near(world_size, 0.01),
    expects=near(1, 1e-3),
)


def gradient_of(network, x, y):
    network.zero_grad()
    cross_entropy(network(x), y).backward()
    return flat(parameter.grad for parameter in network.parameters())


@EXHIBIT.broken
def summed_gradients(on_ranks, network, images, labels, world_size):
    even = len(images) // world_size * world_size  # equal parts for all
    x, y = images[:even], labels[:even]

    def summed(worker):
        gradient = gradient_of(network, part_of(worker, x), part_of(worker, y))
        dist.all_reduce(gradient)
        return gradient

    return round((on_ranks(summed)[0].norm() / gradient_of(network, x, y).norm()).item(), 3)


@EXHIBIT.right
def right(on_ranks, network, images, labels, world_size):
    """`all_reduce` sums by default: divide by the number of ranks. Nothing explodes: for
    plain SGD the sum is a learning rate so many times as large."""
    even = len(images) // world_size * world_size
    x, y = images[:even], labels[:even]

    def averaged(worker):
        gradient = gradient_of(network, part_of(worker, x), part_of(worker, y))
        dist.all_reduce(gradient)
        return gradient / worker.world_size

    ours, whole = on_ranks(averaged)[0], gradient_of(network, x, y)
    assert (ours - whole).abs().max() < 1e-5
    return round((ours.norm() / whole.norm()).item(), 3)
