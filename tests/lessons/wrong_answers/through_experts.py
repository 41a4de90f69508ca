"""Wrong answers to `through_experts`, and a piece of what each must be told."""

import torch.distributed as dist

from course.exercises.through_experts import through_experts
from tests.support.wrong_answers import told


@told("this rank's own expert did it")
def stays_at_home(x, chosen, work):
    """No communication."""
    return work(x)


@told("in the order in which they were sent, not in that of the tokens")
def forgets_the_order(x, chosen, work):
    """Comes back sorted by experts."""
    return through_experts(x, chosen, work)[chosen.argsort(stable=True)]


@told("sorted twice")
def sorts_twice(x, chosen, work):
    """By the same order again."""
    order = chosen.argsort(stable=True)
    return through_experts(x, chosen, work)[order][order]


@told("failed: RuntimeError")
def equal_parts(x, chosen, work):
    """As if as many came as go."""
    n = dist.get_world_size()
    order = chosen.argsort(stable=True)
    leaving = chosen.bincount(minlength=n).tolist()
    arrived = x.new_empty(x.shape[0] // n * n, x.shape[1])
    dist.all_to_all_single(arrived, x[order], None, leaving)
    return work(arrived)
