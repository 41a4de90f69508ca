"""backward inside no_sync."""

import torch
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import course
from course.pitfalls.base import Exhibit, below
from course.pitfalls.helpers import far_from_one_process, flat, part_of

EXHIBIT = Exhibit(
    wing="gradients",
    title="backward inside no_sync",
    story="""
    The forward pass is outside of `no_sync`, and `backward` alone inside. How far is the gradient
    from that of one process with all images?
    """,
    choices=(
        "equal up to rounding",
        "far: it is the rank's own",
    ),
    shows=1,
    expects=below(1e-9),
    why="""
    DDP decides in `forward` whether the following `backward` averages. Here it does, whatever
    `backward` is wrapped in. To accumulate without averaging, put both inside.
    """,
)


@EXHIBIT.sound
def backward_in_no_sync(on_ranks, images, labels):
    def gradient(worker):
        torch.manual_seed(0)
        model = DistributedDataParallel(course.models.linear(images[0].numel()).double())
        x, y = part_of(worker, images[:240]).double(), part_of(worker, labels[:240])
        loss = cross_entropy(model(x), y)
        with model.no_sync():
            loss.backward()
        return flat(parameter.grad for parameter in model.parameters())

    return far_from_one_process(on_ranks(gradient)[0], images, labels)
