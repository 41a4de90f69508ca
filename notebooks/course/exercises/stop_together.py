"""Exercise: a hang to mend, one rank stops early."""

from __future__ import annotations

import torch
import torch.distributed as dist

from course.exercises.base import Exercise
from course.exercises.trial import Trial

EXERCISE = Exercise(
    lesson="13",
    title="A hang to mend: one rank stops early",
    statement="""
    This loop trains until the loss is below a limit: `losses` is a generator that takes a training step for each loss
    that it yields. Each rank looks at its own, and leaves when that is low enough. The others wait for it in the next
    step. Mend it: all ranks stop after the first step in which the *mean* of their losses is below the limit, or at
    the end; all have equally many losses. Return how many steps were done. One all-reduce a step is enough.
    """,
    hints=(
        "A decision that all ranks must take alike has to be made from numbers that all ranks have alike.",
        "The all-reduce that is there already gives every rank the same total.",
    ),
    why="Every rank sees the same mean, so all take the same decision without another message.",
    allowed=("all_reduce",),
    cases=(
        {"losses": ((5, 4, 3, 2, 1), (9, 8, 4, 1, 1), (9, 9, 9, 1, 1), (7, 7, 7, 7, 1)), "limit": 3.5},
        {"losses": ((5, 5), (4, 4), (6, 6), (5, 5)), "limit": 1.0},
        {"losses": ((1, 1, 1), (0, 1, 1), (1, 1, 1), (1, 1, 1)), "limit": 2.0},
        {"losses": ((4, 2, 1), (4, 2, 1), (4, 2, 1), (4, 2, 1)), "limit": 2.0},
    ),
    given={
        "body": """
        steps = 0
        for loss in losses:
            total = torch.tensor(loss)
            dist.all_reduce(total)  # stands for the step's communication
            steps += 1
            if loss < limit:
                break
        return steps
        """
    },
)


@EXERCISE.reference
def stop_together(losses, limit):
    """Return the number of steps done, the same on every rank; `losses` yields this rank's, a float a step."""
    steps = 0
    for loss in losses:
        total = torch.tensor(loss)
        dist.all_reduce(total)  # stands for the step's communication
        steps += 1
        if total / dist.get_world_size() < limit:
            break
    return steps


@EXERCISE.trial
def trial(t: Trial, losses: tuple[tuple[float, ...], ...], limit: float) -> None:
    """Call it with losses that fall at different times."""
    here = [[float(loss) for loss in each] for each in losses[: t.world_size]]
    means = [sum(step) / t.world_size for step in zip(*here, strict=True)]
    below = [mean < limit for mean in means]
    expected = below.index(True) + 1 if any(below) else len(means)
    own = iter(here[t.rank])
    steps = t.call((loss for loss in own), limit)
    t.require(type(steps) is int, f"returned {steps!r}, expected the number of steps, an int")
    said = ", ".join(f"{mean:.3g}" for mean in means)
    t.require(
        steps == expected, f"did {steps} steps, expected {expected}: the mean losses are {said}, the limit {limit:g}"
    )
    calls = t.traffic.count("all_reduce")
    t.require(calls <= steps, f"called all_reduce {calls} times in {steps} steps, expected one a step")
    taken = len(means) - len(list(own))
    t.require(taken == steps, f"took {taken} losses, and so as many training steps, but returned {steps}")
