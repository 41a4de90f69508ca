"""One call per tensor."""

import time

import torch
import torch.distributed as dist

from course.pitfalls.base import Exhibit, above, below
from course.pitfalls.helpers import flat

EXHIBIT = Exhibit(
    wing="gradients",
    title="80 calls of all_reduce",
    story="""
    [*Writing Distributed Applications with
    PyTorch*](https://docs.pytorch.org/tutorials/intermediate/dist_tuto.html) averages
    gradients with an `all_reduce` for each. Here are 80 tensors of 500 numbers: how long do
    80 calls take, compared with one for all of them?
    """,
    choices=(
        "as long",
        "1.5 times as long",
        "more than 3 times as long",
    ),
    shows=3,
    gives=above(3),
    expects=below(3),
    kind="slow",
)


def seconds(tensors):
    dist.barrier()
    began = time.perf_counter()
    for tensor in tensors:
        dist.all_reduce(tensor)
    return time.perf_counter() - began


@EXHIBIT.broken
def one_call_per_tensor(on_ranks):
    def times_as_long(worker):
        tensors = [torch.ones(500) for _ in range(80)]
        buffer = flat(tensors)
        times = [(seconds(tensors), seconds([buffer])) for _ in range(15)]  # in turn: as busy
        ours, one_call = (min(of_one) for of_one in zip(*times, strict=True))
        return ours / one_call

    return round(on_ranks(times_as_long)[0], 1)


@EXHIBIT.right
def right(on_ranks):
    """Each call pays the latency. Send one buffer, as DDP does with its buckets: the result is
    the same."""

    def times_as_long(worker):
        tensors = [torch.full((500,), float(worker.rank)) for _ in range(80)]
        ours, buffer = flat(tensors), flat(tensors)
        dist.all_reduce(buffer)
        for tensor in tensors:
            dist.all_reduce(tensor)
        assert torch.equal(buffer, flat(tensors))
        times = [(seconds([ours]), seconds([buffer])) for _ in range(15)]
        ours_s, one_call_s = (min(of_one) for of_one in zip(*times, strict=True))
        return ours_s / one_call_s

    return round(on_ranks(times_as_long)[0], 1)
