"""Wrong answers to `stop_together`, and a piece of what each must be told."""

import torch.distributed as dist

from course.exercises.stop_together import EXERCISE, stop_together
from tests.support.wrong_answers import WrongAnswers

WRONG = WrongAnswers(EXERCISE)

# The hang.
WRONG.slip(
    "as_it_was",
    "a hang: rank 1 waits in all_reduce for the other ranks",
    ("total / dist.get_world_size() < limit", "loss < limit"),
)


@WRONG("did 5 steps, expected 4")
def compares_the_sum(losses, limit):
    """No division."""
    return stop_together((loss * dist.get_world_size() for loss in losses), limit)


@WRONG("did 3 steps, expected 4")
def counts_one_less(losses, limit):
    """Off by one."""
    return stop_together(losses, limit) - 1


# A second all-reduce for the decision.
WRONG.slip(
    "asks_twice",
    "called all_reduce 8 times in 4 steps, expected one a step",
    ("dist.all_reduce(total)", "dist.all_reduce(total.clone()), dist.all_reduce(total)"),
)


@WRONG("has no len()")
def asks_for_the_length(losses, limit):
    """A generator has none."""
    return stop_together([losses[step] for step in range(len(losses))], limit)


@WRONG("took 5 losses, and so as many training steps, but returned 4")
def trains_to_the_end(losses, limit):
    """All steps, and then the decision."""
    return stop_together(list(losses), limit)
