"""Exercise: clipping gradients of which each rank has a part."""

from __future__ import annotations

import torch
import torch.distributed as dist

from course.exercises.base import Cost, Exercise
from course.exercises.trial import Trial

EXERCISE = Exercise(
    lesson="08",
    title="Clipping sharded gradients",
    statement="""
    Each rank has its own shards of the gradients, as FSDP leaves them: `shards`, a list of tensors. All
    ranks' shards together are the gradient. If its norm (the square root of the sum of all squares)
    is more than `most`, scale it to that norm, in place; else leave it. Return the norm before, a
    float, the same on all ranks. One `dist.all_reduce`.
    """,
    hints=(
        "`torch.nn.utils.clip_grad_norm_` on each rank finds the norm of that rank's shards only.",
        "Norms do not add up over ranks; squares do.",
        "Scale by `most / norm`, but never up.",
    ),
    why="Squares add up over ranks and norms do not, so the sum of squares is reduced, and every rank scales by the "
    "same factor.",
    allowed=("all_reduce",),
    cases=(
        {"shapes": ((2, 3), (4,)), "most": 10.0},
        {"shapes": ((5,),), "most": 1e6},
        {"shapes": ((1, 2), (3,), (2, 2)), "most": 0.5},
    ),
)


@EXERCISE.reference
def clip_shards(shards, most):
    """Scale this rank's shards in place; return the norm of the whole gradient before."""
    squares = sum(shard.square().sum() for shard in shards)
    dist.all_reduce(squares)
    norm = squares.sqrt().item()
    if norm > most:
        for shard in shards:
            shard *= most / norm
    return norm


@EXERCISE.trial
def trial(t: Trial, shapes: tuple[tuple[int, ...], ...], most: float) -> None:
    """Call it, and compare with the whole gradient in one process."""
    n = t.world_size
    of_ranks = [[t.numbers(*shape, of=rank, salt=f"{i}") for i, shape in enumerate(shapes)] for rank in range(n)]
    squares = [sum(float(shard.square().sum()) for shard in shards) for shards in of_ranks]
    norm, own = sum(squares) ** 0.5, squares[t.rank] ** 0.5
    shards = [shard.clone() for shard in of_ranks[t.rank]]
    found = t.call(shards, most)
    known = {
        own: ": that is the norm of this rank's shards",
        sum(square**0.5 for square in squares): ": norms do not add up, squares do",
        sum(squares): ": that is the sum of the squares",
        most: ": that is the norm afterwards",
    }
    if not isinstance(found, (int, float)):
        t.fail(f"returned a {type(found).__name__}, expected a float")
    near = {value: text for value, text in known.items() if n > 1 or value != own}
    said = next((text for value, text in near.items() if abs(value - found) < 1e-3 * value), "")
    t.require(abs(found - norm) < 1e-4 * norm, f"the norm is {found:.6g}, expected {norm:.6g}{said}")
    factor = min(1.0, most / norm)
    for index, (now, before) in enumerate(zip(shards, of_ranks[t.rank], strict=True)):
        known = {"scaled up: it was shorter than `most`": before * most / norm} if norm < most else {}
        t.equal(f"shards[{index}]", now, before * factor, before if factor < 1 else None, known)
    t.reduced_once()


@EXERCISE.best
def best(world_size: int, shapes: tuple[tuple[int, ...], ...], most: float) -> Cost:
    """Return one all-reduce of a number."""
    return Cost.all_reduce(4, world_size)


# As clip_grad_norm_ does.
EXERCISE.slip("each_for_itself", "that is the norm of this rank's shards", ("dist.all_reduce(squares)", "pass"))

# The triangle inequality.
EXERCISE.slip(
    "adds_norms",
    "norms do not add up, squares do",
    ("squares.sqrt()", "squares"),
    ("for shard in shards)", "for shard in shards).sqrt()"),
)

# Normalises.
EXERCISE.slip("always_scales", "scaled up: it was shorter than `most`", ("if norm > most:", "if True:"))

# Out of place.
EXERCISE.slip("only_measures", "nothing has changed it", ("shard *= most / norm", "shard = shard * most / norm"))


@EXERCISE.wrong("called all_reduce 2 times, expected once")
def one_call_per_shard(shards, most):
    """A call for each."""
    squares = torch.zeros(())
    for shard in shards:
        square = shard.square().sum()
        dist.all_reduce(square)
        squares += square
    for shard in shards:
        shard *= min(1.0, most / squares.sqrt().item())
    return squares.sqrt().item()
