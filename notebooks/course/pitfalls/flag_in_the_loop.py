"""A flag, one step too late."""

import torch
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import course
from course.pitfalls.base import Exhibit, above, below
from course.pitfalls.helpers import far_from_one_process, flat, part_of

EXHIBIT = Exhibit(
    wing="well_known",
    title="require_backward_grad_sync",
    story="""
    A [video lecture's code on GPT-2](https://github.com/karpathy/build-nanogpt/pull/30) set
    `require_backward_grad_sync` between forward and backward. Below, gradients of four
    micro-batches are summed, and averaged over ranks once. How far are they from those of one
    process?
    """,
    choices=(
        "equal up to rounding",
        "wrong",
    ),
    shows=2,
    gives=above(0.05),
    expects=below(1e-6),
)


def accumulated(worker, images, labels, when):
    """Gradients of four micro-batches, averaged over ranks once."""
    torch.manual_seed(0)
    model = DistributedDataParallel(course.models.linear(images[0].numel()).double())
    x, y = part_of(worker, images[:240]).double().chunk(4), part_of(worker, labels[:240]).chunk(4)
    for index in range(4):
        if when == "before forward":
            model.require_backward_grad_sync = index == 3
        loss = cross_entropy(model(x[index]), y[index]) / 4
        if when == "after forward":
            model.require_backward_grad_sync = index == 3
        loss.backward()
    return flat(parameter.grad for parameter in model.parameters())


@EXHIBIT.broken
def flag_in_the_loop(on_ranks, images, labels):
    found = on_ranks(lambda worker: accumulated(worker, images, labels, "after forward"))[0]
    return round(far_from_one_process(found, images, labels), 3)


@EXHIBIT.right
def right(on_ranks, images, labels):
    """DDP decides in `forward` whether the following `backward` averages. Set the flag before
    it. Lesson 12 has four ways to write this."""
    found = on_ranks(lambda worker: accumulated(worker, images, labels, "before forward"))[0]
    return far_from_one_process(found, images, labels)
