"""One call per tensor: an exhibit of the museum of pitfalls."""

from __future__ import annotations

import statistics
import time

import torch
import torch.distributed as dist

from course.pitfalls.base import Exhibit
from course.pitfalls.helpers import flat

EXHIBIT = Exhibit(
    wing="gradients",
    title="One call per tensor",
    story="""
    [*Writing Distributed Applications with
    PyTorch*](https://docs.pytorch.org/tutorials/intermediate/dist_tuto.html) averages
    gradients with an `all_reduce` for each. Here are 80 tensors of 500 numbers: how long do
    80 calls take, compared with one for all of them?
    """,
    choices=(
        "as long",
        "1.2 times as long",
        "more than 1.5 times as long",
    ),
    shows=3,
    kind="slow",
)


def both_ways(worker):
    def seconds(tensors):
        dist.barrier()
        began = time.perf_counter()
        for tensor in tensors:
            dist.all_reduce(tensor)
        return time.perf_counter() - began

    each = [torch.ones(500) for _ in range(80)]
    times = [(seconds(each), seconds([flat(each)])) for _ in range(7)]  # in turn: as busy for both
    return [statistics.median(of_one) for of_one in zip(*times, strict=True)]


@EXHIBIT.broken
def one_call_per_tensor(on_ranks):
    each_s, flat_s = on_ranks(both_ways)[0]
    return round(each_s / flat_s, 1)


@EXHIBIT.symptom
def symptom(seen):
    return seen > 1.5


@EXHIBIT.right
def right(on_ranks, seed):
    """Each call pays the latency. Send them as one buffer, as DDP does with its buckets:
    the result is the same."""

    def same(worker):
        torch.manual_seed(seed + worker.rank)
        tensors = [torch.randn(500) for _ in range(80)]
        whole = flat(tensors)
        dist.all_reduce(whole)
        for tensor in tensors:
            dist.all_reduce(tensor)
        return (whole - flat(tensors)).abs().max().item()

    apart = on_ranks(same)
    assert all(each < 1e-5 for each in apart)
    return f"differs by {max(apart)}"
