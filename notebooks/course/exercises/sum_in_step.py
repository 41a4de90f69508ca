"""Exercise: a hang to mend, unequally many batches."""

from __future__ import annotations

import torch
import torch.distributed as dist

from course.exercises.base import Exercise
from course.exercises.trial import Trial

EXERCISE = Exercise(
    lesson="13",
    title="A hang to mend: unequally many batches",
    statement="""
    This function adds up the ranks' batches step by step. It hangs when one rank has fewer batches than another. Mend
    it: do as many steps as *every* rank has batches for, and return their totals. The batches stay as they are.
    """,
    hints=(
        "The rank with most batches waits in a step that the others never take.",
        "Before the first step the ranks can agree on how many there will be.",
        "`dist.all_reduce(count, op=dist.ReduceOp.MIN)`.",
    ),
    why="All ranks must make the same calls, so their number has to be agreed on before.",
    allowed=("all_reduce",),
    cases=({"counts": (3, 4, 2, 5)}, {"counts": (2, 1, 6, 6)}, {"counts": (0, 1, 2, 1)}, {"counts": (2, 2, 2, 2)}),
    given={
        "body": """
        totals = []
        for batch in batches:
            total = batch.clone()
            dist.all_reduce(total)
            totals.append(total)
        return totals
        """
    },
)


@EXERCISE.reference
def sum_in_step(batches):
    """Return each batch's sum over the ranks: a list of tensors, for as many steps as every rank has batches."""
    steps = torch.tensor(len(batches))
    dist.all_reduce(steps, op=dist.ReduceOp.MIN)
    totals = []
    for batch in batches[: steps.item()]:
        total = batch.clone()
        dist.all_reduce(total)
        totals.append(total)
    return totals


@EXERCISE.trial
def trial(t: Trial, counts: tuple[int, ...]) -> None:
    """Call it with unequally many batches."""
    batches = [[t.numbers(2, of=rank, salt=f"{i}") for i in range(counts[rank])] for rank in range(t.world_size)]
    given = [batch.clone() for batch in batches[t.rank]]
    totals = t.call(given)
    steps = min(counts[: t.world_size])
    t.require(isinstance(totals, list), f"returned a {type(totals).__name__}, expected a list")
    t.require(len(totals) == steps, f"returned {len(totals)} totals, expected {steps}, the fewest batches of any rank")
    for i, total in enumerate(totals):
        t.equal(f"totals[{i}]", total, torch.stack([each[i] for each in batches]).sum(0), batches[t.rank][i])
    for i, (now, before) in enumerate(zip(given, batches[t.rank], strict=True)):
        t.unchanged(f"batches[{i}]", now, before)
