"""Wrong answers that are more than a slip, by exercise, and a piece of what each must be told."""

import itertools
import threading
from pathlib import Path

import torch
import torch.distributed as dist

from course.exercises.zero_bubble import zero_bubble


def rank_0_sends_to_all(tensor, rank, world_size):
    """Right, and slow: seen with four ranks."""
    if rank == 0:
        for other in range(1, world_size):
            dist.send(tensor, other)
    else:
        dist.recv(tensor, 0)


def passes_whole_tensors_on(tensor, rank, world_size):
    """Everybody's tensor goes around: right, but n − 1 tensors are sent."""
    passing = tensor.clone(memory_format=torch.contiguous_format)
    for _ in range(world_size - 1):
        arrived = torch.empty_like(passing)
        sending = dist.isend(passing, (rank + 1) % world_size)
        dist.recv(arrived, (rank - 1) % world_size)
        sending.wait()
        tensor += arrived
        passing = arrived


def as_it_was(path, world_size):
    """Unrepaired."""
    lock = threading.Lock()
    numbers = (float(line) for line in Path(path).read_text().split())

    def task(rank: int) -> float:
        with lock:
            return sum(itertools.islice(numbers, rank, None, world_size))

    return task


def an_iterator(path, world_size):
    """An iterator of a list can be sent, but is used up."""
    numbers = iter([float(line) for line in Path(path).read_text().split()])
    return lambda rank: sum(itertools.islice(numbers, rank, None, world_size))


def in_a_circle(stage, stages, micro_batches):
    """The first stage takes its micro-batches from the last to the first one."""
    order = zero_bubble(stage, stages, micro_batches)
    return [(kind, i if stage else micro_batches - 1 - i) for kind, i in order]


FUNCTIONS = {
    "broadcast_tree": [
        ("sent 3 messages; along a tree no rank sends more than ⌈log₂ n⌉ = 2", rank_0_sends_to_all),
    ],
    "ring_all_reduce": [
        ("around a ring no rank sends more than 2(n − 1)/n of the tensor", passes_whole_tensors_on),
    ],
    "task_for_ranks": [
        ("`task` cannot be sent: cannot pickle", as_it_was),
        ("`task(0)` is 0 in its second call", an_iterator),
    ],
    "zero_bubble": [("deadlock: rank 0 is blocked before ", in_a_circle)],
}
