"""Wrong answers to `broadcast_tree`, and a piece of what each must be told."""

import torch.distributed as dist

from tests.support.wrong_answers import told


@told("sent 3 messages; along a tree no rank sends more than ⌈log₂ n⌉ = 2")
def rank_0_sends_to_all(tensor, rank, world_size):
    """Right, and slow: seen with four ranks."""
    if rank == 0:
        for other in range(1, world_size):
            dist.send(tensor, other)
    else:
        dist.recv(tensor, 0)


@told("calls dist.broadcast, which this exercise does not allow; it allows")
def calls_the_collective(tensor, rank, world_size):
    """Leave it to torch."""
    dist.broadcast(tensor, 0)


# No look at whether there is such a rank.

# The copy is thrown away.


@told("waits in send for rank")
def all_send_first(tensor, rank, world_size):
    """In a circle, each waits until the next one receives."""
    if world_size > 1:
        dist.send(tensor, (rank + 1) % world_size)
        dist.recv(tensor, (rank - 1) % world_size)
