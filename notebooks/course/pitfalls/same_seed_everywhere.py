"""manual_seed(0), and a linear network."""

import torch
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import course
from course.pitfalls.base import Exhibit, below
from course.pitfalls.helpers import far_from_one_process, flat, part_of

EXHIBIT = Exhibit(
    wing="data",
    title="manual_seed(0), and a linear network",
    story="""
    Again one seed for all ranks. This network is linear, in float64, and each rank has its own
    part of 240 images. How far is the averaged gradient from that of one process?
    """,
    choices=(
        "equal up to rounding",
        "wrong: all ranks draw the same numbers",
    ),
    shows=1,
    expects=below(1e-9),
    why="""
    After its creation this network draws no random numbers: no dropout, no augmentation. Equal
    seeds then only make equal weights, as DDP's broadcast does anyway.
    """,
)


@EXHIBIT.sound
def same_seed_everywhere(on_ranks, images, labels):
    def gradient(worker):
        torch.manual_seed(0)
        model = DistributedDataParallel(course.models.linear(images[0].numel()).double())
        x, y = part_of(worker, images[:240]).double(), part_of(worker, labels[:240])
        cross_entropy(model(x), y).backward()
        return flat(parameter.grad for parameter in model.parameters())

    return far_from_one_process(on_ranks(gradient)[0], images, labels)
