"""Exercise: to the experts and back, however many tokens want to go where."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from course.exercises.base import Cost, Exercise, ring_bytes
from course.exercises.trial import Trial

EXERCISE = Exercise(
    lesson="24",
    title="To the experts and back",
    statement="""
    Without a capacity nothing is dropped, but a rank cannot know in advance how many tokens it will receive. Each
    rank has one expert: `work`, which takes (any number, width) and returns as many. Token i of this rank goes to
    the expert of rank `chosen[i]`. Return the experts' outputs for this rank's tokens, in their order.

    No rank is sent tokens that have not chosen its expert. Three `dist.all_to_all_single` are enough; its
    third and fourth arguments are lists: how many rows come from each rank, and how many go to each.
    """,
    hints=(
        "All that goes to one rank must lie together: `order = chosen.argsort(stable=True)`, then `x[order]`.",
        "First tell each rank how many will come: `chosen.bincount(minlength=n)` is n numbers, one for each.",
        "`dist.all_to_all_single(arrived, x[order], arriving, leaving)` takes the sizes as lists. On the way back they "
        "change places.",
        "`found[order] = back` undoes `back = x[order]`.",
    ),
    why="Sizes must be known before the rows can be received, and what the tokens were sorted by must be undone.",
    allowed=("all_to_all_single",),
    cases=({"tokens": 7, "width": 2}, {"tokens": 5, "width": 1}, {"tokens": 12, "width": 3}),
)


@EXERCISE.reference
def through_experts(x, chosen, work):
    """Return (tokens, width). `x` is (tokens, width); `chosen` (tokens,), whole numbers, are ranks."""
    order = chosen.argsort(stable=True)
    leaving = chosen.bincount(minlength=dist.get_world_size())
    arriving = torch.empty_like(leaving)
    dist.all_to_all_single(arriving, leaving)
    leaving, arriving = leaving.tolist(), arriving.tolist()
    arrived = x.new_empty(sum(arriving), x.shape[1])
    dist.all_to_all_single(arrived, x[order], arriving, leaving)
    back = torch.empty_like(x)
    dist.all_to_all_single(back, work(arrived), leaving, arriving)
    found = torch.empty_like(x)
    found[order] = back
    return found


def chosen_by(rank: int, world_size: int, tokens: int, case: int) -> torch.Tensor:
    """Return where the tokens of a rank want to go: everywhere; in the second case, all to rank 0."""
    places = torch.arange(tokens)
    return torch.zeros_like(places) if case == 1 else (places * places + 2 * places + rank) % world_size


@EXERCISE.trial
def trial(t: Trial, tokens: int, width: int) -> None:
    """Call it with experts of which each multiplies by its own number."""
    n = t.world_size
    x = t.numbers(tokens, width)
    chosen = chosen_by(t.rank, n, tokens, t.case)
    wanted = sum(int((chosen_by(rank, n, tokens, t.case) == t.rank).sum()) for rank in range(n))
    rows: list[int] = []

    def work(arrived: Any) -> Any:
        t.require(isinstance(arrived, torch.Tensor), f"the expert got a {type(arrived).__name__}, expected a tensor")
        t.require(
            arrived.dim() == 2 and arrived.shape[1] == width,
            f"the expert got shape {tuple(arrived.shape)}, expected (any number, {width})",
        )
        rows.append(len(arrived))
        return arrived * (t.rank + 2)

    given, asked = x.clone(), chosen.clone()
    found = t.call(given, asked, work)
    expected, order = x * (chosen + 2)[:, None], chosen.argsort(stable=True)
    known = {}
    known["this rank's own expert did it"] = x * (t.rank + 2)
    known["in the order in which they were sent, not in that of the tokens"] = expected[order]
    known["sorted twice: `found[order] = back` undoes `x[order]`"] = expected[order][order]
    t.equal("found", found, expected, None, known)
    t.unchanged("x", given, x)
    t.unchanged("chosen", asked, chosen)
    t.require(sum(rows) == wanted, f"the expert got {sum(rows)} tokens; {wanted} had chosen it")


@EXERCISE.best
def best(world_size: int, tokens: int, width: int) -> Cost:
    """Return three all-to-alls: a number to each rank; every token there, and as many back (if all are even)."""
    size = 8 * world_size + 2 * 4 * tokens * width
    return Cost(3, ring_bytes(size, world_size))
