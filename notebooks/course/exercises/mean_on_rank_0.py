"""Exercise: a hang to mend, a collective that only one rank calls."""

from __future__ import annotations

import torch
import torch.distributed as dist

from course.exercises.base import Exercise
from course.exercises.trial import Trial

EXERCISE = Exercise(
    lesson="12",
    title="A hang to mend: a collective on one rank",
    statement="""
    Only rank 0 is to report the mean of all ranks' values, and so only rank 0 computes it, and waits. Mend it: return
    the mean on rank 0, and None on the others.
    """,
    hints=(
        "What waits for whom? All ranks must make the call.",
        "What only rank 0 does is *use* the result.",
    ),
    why="All ranks make the call, and only what follows from it may depend on the rank.",
    allowed=("all_reduce", "reduce"),
    cases=({"salt": "a"}, {"salt": "b"}),
    given={
        "body": """
        if dist.get_rank() == 0:
            total = torch.tensor(value)
            dist.all_reduce(total)
            return total.item() / dist.get_world_size()
        return None
        """
    },
)


@EXERCISE.reference
def mean_on_rank_0(value):
    """Return the mean of all ranks' values (float) on rank 0, and None on the others."""
    total = torch.tensor(value)
    dist.all_reduce(total)
    if dist.get_rank() == 0:
        return total.item() / dist.get_world_size()
    return None


@EXERCISE.trial
def trial(t: Trial, salt: str) -> None:
    """Call it, and compare."""
    values = [t.numbers(1, of=rank, salt=salt).item() for rank in range(t.world_size)]
    found = t.call(values[t.rank])
    if t.rank:
        t.require(found is None, f"returned {found!r}, expected None on all ranks but 0")
        return
    t.require(isinstance(found, float), f"returned {found!r}, expected a float")
    known = {"the sum, not the mean": torch.tensor(sum(values)), "rank 0's own value": torch.tensor(values[0])}
    expected = torch.tensor(sum(values) / t.world_size)
    t.equal("returned", torch.tensor(found), expected, None, known)
