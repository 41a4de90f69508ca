"""Exercise: the loss over uneven token counts."""

from __future__ import annotations

import torch
import torch.distributed as dist

from course.exercises.base import Cost, Exercise
from course.exercises.trial import Trial

EXERCISE = Exercise(
    lesson="08",
    title="The loss over uneven token counts",
    statement="""
    `token_losses` holds the losses of this rank's tokens; their number differs from rank to rank. Return the scalar
    on which to call `backward`, such that after DDP, which takes the *mean over ranks* of the gradients, they are
    those of the mean over *all tokens of all ranks*. One `dist.all_reduce` may be called.
    """,
    hints=(
        "The mean over all tokens is the sum of all ranks' sums, divided by the number of all tokens.",
        "DDP will divide by the number of ranks: multiply by it beforehand.",
        "The number of tokens is no part of the graph: all-reduce a plain tensor.",
    ),
    why="Multiplying by n takes back DDP's division by n; what is left is each rank's sum over the common number "
    "of tokens.",
    allowed=("all_reduce",),
    cases=({"counts": (4, 1, 7, 2)}, {"counts": (2, 2, 2, 2)}, {"counts": (1, 30, 5, 1)}),
)


@EXERCISE.reference
def scaled_loss(token_losses):
    """Return the scalar to call `backward` on; `token_losses` (tokens,) is part of a graph."""
    tokens = torch.tensor(float(len(token_losses)))
    dist.all_reduce(tokens)
    return token_losses.sum() * dist.get_world_size() / tokens


@EXERCISE.trial
def trial(t: Trial, counts: tuple[int, ...]) -> None:
    """Call it, go backward, and compare this rank's gradient with its part in that of all tokens."""
    n, here = t.world_size, counts[: t.world_size]
    inputs = t.numbers(counts[t.rank])
    weight = torch.tensor(2.0, requires_grad=True)
    loss = t.call(weight * inputs)
    is_scalar = isinstance(loss, torch.Tensor) and loss.dim() == 0 and loss.requires_grad
    t.require(is_scalar, f"returned {loss!r:.60}, expected a scalar tensor that is part of the graph")
    loss.backward()
    assert weight.grad is not None
    total = inputs.sum()
    known = {
        "that is the mean over this rank's tokens: a rank with few then counts as much as one with many": total
        / len(inputs),
        "DDP's own division by the number of ranks is not taken back": total / sum(here),
        "the sum, not the mean": total,
        "divided by the mean number of tokens twice": total * n * n / sum(here) / sum(here),
    }
    t.equal("weight.grad", weight.grad, total * n / sum(here), None, known)
    t.reduced_once()


@EXERCISE.best
def best(world_size: int, counts: tuple[int, ...]) -> Cost:
    """Return one number of 4 bytes."""
    return Cost.all_reduce(4, world_size)


@EXERCISE.wrong("that is the mean over this rank's tokens")
def mean_of_means(token_losses):
    """What everybody writes first."""
    return token_losses.mean()


@EXERCISE.wrong("DDP's own division by the number of ranks is not taken back")
def forgets_ddp(token_losses):
    """No factor n."""
    return scaled_loss(token_losses) / dist.get_world_size()


@EXERCISE.wrong("the sum, not the mean")
def sums(token_losses):
    """No division."""
    return token_losses.sum()


@EXERCISE.wrong("expected a scalar tensor that is part of the graph")
def leaves_the_graph(token_losses):
    """A plain number."""
    return scaled_loss(token_losses.detach())


@EXERCISE.wrong("called all_reduce 2 times, expected once")
def reduces_the_loss_too(token_losses):
    """Not needed for the gradient."""
    dist.all_reduce(token_losses.detach().sum())
    return scaled_loss(token_losses)
