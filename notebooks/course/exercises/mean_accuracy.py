"""Exercise: accuracy over uneven shares."""

from __future__ import annotations

import torch
import torch.distributed as dist

from course.exercises.base import Cost, Exercise
from course.exercises.trial import Trial

EXERCISE = Exercise(
    lesson="04",
    title="Accuracy over uneven shares",
    statement="""
    Each rank has tested samples of its own: `count` of them, `correct` right. The numbers differ from rank to rank,
    and a rank may have none. Return the accuracy over all samples, as a `float` that is the same on every rank, with
    a single `dist.all_reduce`.
    """,
    hints=(
        "Which is right: the mean of 1/1 and 0/99, or 1/100?",
        "Two numbers can travel in one tensor.",
    ),
    why="Sums can be added up over ranks and ratios cannot, so both sums travel and the division comes last.",
    allowed=("all_reduce",),
    cases=({"counts": (10, 3, 0, 7)}, {"counts": (1, 99, 5, 5)}, {"counts": (4, 4, 4, 4)}),
)


@EXERCISE.reference
def mean_accuracy(correct, count):
    """Return the share of right answers over all ranks, a float. `correct` and `count` (int) are this rank's."""
    sums = torch.tensor([correct, count], dtype=torch.float64)
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


@EXERCISE.trial
def trial(t: Trial, counts: tuple[int, ...]) -> None:
    """Call it, then compare with the whole."""
    right = [count // (rank + 1) if rank else count - 1 for rank, count in enumerate(counts)]
    here = t.world_size
    accuracy = t.call(right[t.rank], counts[t.rank])
    t.require(isinstance(accuracy, float), f"returned a {type(accuracy).__name__}, expected a float")
    expected = sum(right[:here]) / sum(counts[:here])
    shares = [one / count for one, count in zip(right[:here], counts[:here], strict=True) if count]
    known = {
        "the mean of the ranks' accuracies: one sample then counts as much as a hundred": torch.tensor(
            sum(shares) / len(shares)
        ),
        "this rank's own": torch.tensor(right[t.rank] / max(1, counts[t.rank])),
        "divided by the number of ranks, too": torch.tensor(expected / here),
    }
    t.equal("accuracy", torch.tensor(accuracy), torch.tensor(expected), None, known)
    t.reduced_once()


@EXERCISE.best
def best(world_size: int, counts: tuple[int, ...]) -> Cost:
    """Return one call with two numbers of 8 bytes."""
    return Cost.all_reduce(16, world_size)
