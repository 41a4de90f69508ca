"""Wrong answers to `ring_all_reduce`, and a piece of what each must be told."""

import torch
import torch.distributed as dist

from course.exercises.ring_all_reduce import EXERCISE, ring_all_reduce
from tests.support.wrong_answers import WrongAnswers

WRONG = WrongAnswers(EXERCISE)


@WRONG("averaged, where the sum is asked for")
def averages(tensor, rank, world_size):
    """A division too many: seen with three ranks."""
    ring_all_reduce(tensor, rank, world_size)
    if world_size > 2:
        tensor /= world_size


# The whole pieces do not go round.
WRONG.slip("stops_half_way", "`tensor[0]` is", ("range(2 * (world_size - 1))", "range(world_size - 1)"))

# In the second half, too.
WRONG.slip("always_adds", "`tensor[", ("if step < world_size - 1:", "if True:"))


@WRONG("around a ring no rank sends more than 2(n − 1)/n of the tensor")
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


@WRONG("waits in send for rank")
def sends_before_it_receives(tensor, rank, world_size):
    """All wait in send, nobody receives."""
    if world_size > 1:
        dist.send(tensor, (rank + 1) % world_size)
        dist.recv(tensor, (rank - 1) % world_size)


@WRONG("returned with an isend to rank")
def forgets_to_wait(tensor, rank, world_size):
    """The piece may be overwritten before it was sent."""
    if world_size > 1:
        arrived = torch.empty_like(tensor)
        dist.isend(tensor.clone(), (rank + 1) % world_size)
        dist.recv(arrived, (rank - 1) % world_size)
        tensor += arrived


@WRONG("shape=(5, 3), contiguous=False: `tensor[")
def leaves_the_copy(tensor, rank, world_size):
    """A tensor with gaps was summed in a copy."""
    flat = tensor.reshape(-1)
    ring_all_reduce(flat, rank, world_size)
