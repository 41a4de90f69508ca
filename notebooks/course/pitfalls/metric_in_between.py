"""all_reduce between forward and backward."""

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import course
from course.pitfalls.base import Exhibit, below
from course.pitfalls.helpers import far_from_one_process, flat, part_of

EXHIBIT = Exhibit(
    wing="gradients",
    title="all_reduce between forward and backward",
    story="""
    Between forward and backward each rank averages its loss over all ranks, by `all_reduce` of a
    detached copy. How far is the gradient then from that of one process?
    """,
    choices=(
        "equal up to rounding",
        "as many times too large as there are ranks",
        "a deadlock",
    ),
    shows=1,
    expects=below(1e-9),
    why="""
    The copy is no part of the graph, and all ranks call the collectives in the same order: first
    this one, then DDP's. Without `clone()` the sum would overwrite the loss itself.
    """,
)


@EXHIBIT.sound
def metric_in_between(on_ranks, images, labels):
    def gradient(worker):
        torch.manual_seed(0)
        model = DistributedDataParallel(course.models.linear(images[0].numel()).double())
        x, y = part_of(worker, images[:240]).double(), part_of(worker, labels[:240])
        loss = cross_entropy(model(x), y)
        metric = loss.detach().clone()
        dist.all_reduce(metric)
        loss.backward()
        return flat(parameter.grad for parameter in model.parameters())

    return far_from_one_process(on_ranks(gradient)[0], images, labels)
