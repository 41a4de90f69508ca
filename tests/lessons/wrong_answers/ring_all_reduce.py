"""Wrong answers to `ring_all_reduce`, and a piece of what each must be told."""

import torch
import torch.distributed as dist

from course.exercises.ring_all_reduce import ring_all_reduce
from tests.support.wrong_answers import told


@told("averaged, where the sum is asked for")
def averages(tensor, rank, world_size):
    """A division too many: seen with three ranks."""
    ring_all_reduce(tensor, rank, world_size)
    if world_size > 2:
        tensor /= world_size


# The whole pieces do not go round.

# In the second half, too.


@told("waits in send for rank")
def sends_before_it_receives(tensor, rank, world_size):
    """All wait in send, nobody receives."""
    if world_size > 1:
        dist.send(tensor, (rank + 1) % world_size)
        dist.recv(tensor, (rank - 1) % world_size)


@told("shape=(5, 3), contiguous=False: `tensor[")
def leaves_the_copy(tensor, rank, world_size):
    """A tensor with gaps was summed in a copy."""
    flat = tensor.reshape(-1)
    ring_all_reduce(flat, rank, world_size)


@told("around a ring no rank sends more than 2(n − 1)/n of the tensor")
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
