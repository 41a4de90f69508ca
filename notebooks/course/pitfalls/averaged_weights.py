"""Averaging what is equal."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import course
from course.pitfalls.base import Exhibit, Expected
from course.pitfalls.helpers import flat, part_of, spread, steps_of

EXHIBIT = Exhibit(
    wing="gradients",
    title="all_reduce of the parameters, after every step",
    story="""
    One text averages the parameters after every step, with DDP, "so that all GPUs have the same
    parameters". What does that change? (The form returns the greatest change, and the bytes that
    each rank gives to `all_reduce`.)
    """,
    choices=(
        "nothing, and it costs thousands of bytes",
        "it repairs rounding errors",
        "it averages the weights",
    ),
    shows=1,
    gives=Expected(
        "no change, and thousands of bytes", lambda seen: seen[0] < 1e-06 and seen[1] > 1000
    ),
    expects=(0, 0),
    kind="slow",
)


@EXHIBIT.broken
def averaged_weights(on_ranks, images, labels):
    def train(worker):
        model = DistributedDataParallel(course.models.linear(images[0].numel()))
        steps_of(model, part_of(worker, images), part_of(worker, labels))
        before, sent = flat(model.parameters()).clone(), 0
        with torch.no_grad():
            for parameter in model.parameters():
                dist.all_reduce(parameter)
                parameter /= worker.world_size
                sent += parameter.nbytes
        return (flat(model.parameters()) - before).abs().max().item(), sent

    changes, sent = zip(*on_ranks(train), strict=True)
    return max(changes), sent[0]


@EXHIBIT.right
def right(on_ranks, images, labels):
    """Leave it out. Equal weights and equal gradients make equal steps, momentum included. An
    occasional check is worth its bytes."""

    def train(worker):
        model = DistributedDataParallel(course.models.linear(images[0].numel()))
        optimizer = steps_of(model, part_of(worker, images), part_of(worker, labels))
        momentum = [optimizer.state[p]["momentum_buffer"] for p in model.parameters()]
        return torch.cat([flat(model.parameters()), flat(momentum)])

    return spread(on_ranks(train)), 0
