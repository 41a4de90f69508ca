"""Wrong answers to `micro_batch_weights`, and a piece of what each must be told."""

import torch.distributed as dist

from course.exercises.micro_batch_weights import micro_batch_weights
from tests.support.wrong_answers import told


@told("all micro-batches count alike")
def alike(tokens):
    """As with equally many."""
    return [1 / len(tokens) for _ in tokens]


@told("others have more or fewer")
def of_this_rank(tokens):
    """No communication."""
    return [count / sum(tokens) for count in tokens]


@told("is not taken back")
def divided_twice(tokens):
    """The mean of DDP forgotten."""
    return [weight / dist.get_world_size() for weight in micro_batch_weights(tokens)]


@told("that is the sum over all tokens, not their mean")
def sums(tokens):
    """Not divided."""
    return [float(count * dist.get_world_size()) for count in tokens]


@told("returned a NoneType, expected a list of floats")
def nothing(tokens):
    """No return."""
    micro_batch_weights(tokens)
