"""Wrong answers to `sum_in_step`, and a piece of what each must be told."""

import torch.distributed as dist

from course.exercises.sum_in_step import sum_in_step
from tests.support.wrong_answers import told


@told("a hang: rank 1 waits in all_reduce for the other ranks")
def as_it_was(batches):
    """The hang."""
    totals = []
    for batch in batches:
        total = batch.clone()
        dist.all_reduce(total)
        totals.append(total)
    return totals


@told("returned 4 totals, expected 3, the fewest batches of any rank")
def goes_on_alone(batches):
    """What is left is added up by nobody."""
    totals = sum_in_step(batches)
    return totals + [batch.clone() for batch in batches[len(totals) :]]


@told("`batches[0]` was changed")
def adds_in_place(batches):
    """No clone."""
    totals = sum_in_step(batches)
    for batch, total in zip(batches, totals, strict=False):
        batch.copy_(total)
    return totals


@told("nothing has changed it")
def does_not_add(batches):
    """No hang, and no sum."""
    return batches[: len(sum_in_step(batches))]
