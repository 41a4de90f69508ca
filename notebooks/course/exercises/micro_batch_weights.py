"""Exercise: gradients accumulated over micro-batches with unequally many tokens."""

from __future__ import annotations

import torch
import torch.distributed as dist

from course.exercises.base import Cost, Exercise
from course.exercises.trial import Trial

EXERCISE = Exercise(
    lesson="08",
    title="Accumulating over uneven micro-batches",
    statement="""
    A rank calls `backward` once for each of its micro-batches, on the *mean* loss of that micro-batch's
    tokens, multiplied by a weight; gradients add up, and in the end DDP takes their mean over the
    ranks. The micro-batches have unequally many tokens, and the ranks unequally many micro-batches.
    `tokens` are the numbers of this rank's. Return the weights, such that the gradient is that of the
    mean over all tokens of all micro-batches of all ranks. One `dist.all_reduce`.
    """,
    hints=(
        "A mean times the number of its tokens is a sum; sums add up, to be divided by the number of all tokens.",
        "Dividing each micro-batch's loss by their number is right only if all have equally many tokens.",
        "DDP divides by the number of ranks: multiply by it.",
    ),
    why="tokens / (all tokens) makes the means a mean over all tokens, and the number of ranks takes back DDP's "
    "division.",
    allowed=("all_reduce",),
    cases=(
        {"tokens": ((4, 1), (7, 2, 2), (3,), (1, 1, 8, 5))},
        {"tokens": ((2, 2), (2, 2), (2, 2), (2, 2))},
        {"tokens": ((30,), (1, 2), (1, 1, 1), (9, 3))},
    ),
)


@EXERCISE.reference
def micro_batch_weights(tokens):
    """Return a list of floats: what to multiply each of this rank's mean losses by; `tokens` is a list of ints."""
    total = torch.tensor(float(sum(tokens)))
    dist.all_reduce(total)
    return [count * dist.get_world_size() / total.item() for count in tokens]


@EXERCISE.trial
def trial(t: Trial, tokens: tuple[tuple[int, ...], ...]) -> None:
    """Call it, and compare."""
    n, own = t.world_size, list(tokens[t.rank])
    counts = [sum(each) for each in tokens[:n]]
    found = t.call(list(own))
    t.require(isinstance(found, (list, tuple)), f"returned a {type(found).__name__}, expected a list of floats")
    t.require(len(found) == len(own), f"returned {len(found)} weights for {len(own)} micro-batches")
    all_tokens = sum(counts)
    expected = torch.tensor([count * n / all_tokens for count in own])
    known = {}
    known["DDP's own division by the number of ranks is not taken back"] = expected / n
    known["that is the mean over this rank's tokens; others have more or fewer"] = torch.tensor(own) / sum(own)
    known["all micro-batches count alike, though some have more tokens"] = torch.full((len(own),), 1 / len(own))
    known["that is the sum over all tokens, not their mean"] = torch.tensor(own).float() * n
    t.equal("weights", torch.tensor([float(weight) for weight in found]), expected, None, known)
    t.reduced_once()


@EXERCISE.best
def best(world_size: int, tokens: tuple[tuple[int, ...], ...]) -> Cost:
    """Return one all-reduce of a number."""
    return Cost.all_reduce(4, world_size)
