"""Wrong answers to `stop_together`, and a piece of what each must be told."""

import torch.distributed as dist

from course.exercises.stop_together import stop_together
from tests.support.wrong_answers import told

# The hang.


@told("did 5 steps, expected 4")
def compares_the_sum(losses, limit):
    """No division."""
    return stop_together((loss * dist.get_world_size() for loss in losses), limit)


@told("did 3 steps, expected 4")
def counts_one_less(losses, limit):
    """Off by one."""
    return stop_together(losses, limit) - 1


# A second all-reduce for the decision.


@told("has no len()")
def asks_for_the_length(losses, limit):
    """A generator has none."""
    return stop_together([losses[step] for step in range(len(losses))], limit)


@told("took 5 losses, and so as many training steps, but returned 4")
def trains_to_the_end(losses, limit):
    """All steps, and then the decision."""
    return stop_together(list(losses), limit)
