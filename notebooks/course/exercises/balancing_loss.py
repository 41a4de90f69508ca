"""Exercise: the loss that has a router share tokens out."""

from __future__ import annotations

import torch
import torch.distributed as dist

from course.exercises.base import Cost, Exercise
from course.exercises.trial import Trial

EXERCISE = Exercise(
    lesson="24",
    title="A loss for balance",
    statement="""
    Switch's auxiliary loss is E · Σ f · P, summed over the E experts: f is the share of the tokens
    whose likeliest expert this is, P the mean of the probabilities that the router gives it. It is 1
    if the router likes all experts equally, and up to E if one expert gets all. `logits` are the router's,
    (tokens, experts), of this rank's tokens; all ranks have equally many. f is to be that of
    *all* ranks' tokens, so that an expert may be popular on one rank and not on another. Return this
    rank's loss: gradients are averaged over the ranks afterwards, as in DDP. One `dist.all_reduce`.
    """,
    hints=(
        "P is `logits.softmax(1).mean(0)`; f counts `argmax(1)`, say with `bincount(minlength=experts)`.",
        "f is a count, so no gradient goes through it: all-reduce it as it is. The gradient comes through P.",
        "P stays this rank's own: the mean over the ranks of E · Σ f · P is the loss of the whole batch.",
    ),
    why="f says which experts are too popular, and through P the router learns to choose these less. As f has no "
    "gradient, an all-reduce of E numbers is enough to balance the whole batch. The loss may be below 1: it pushes "
    "towards balance, and is no measure of it.",
    allowed=("all_reduce",),
    cases=({"tokens": 8, "experts": 4}, {"tokens": 5, "experts": 3}),
)


@EXERCISE.reference
def balancing_loss(logits):
    """Return the loss, shape (), whose mean over the ranks is that of all tokens. `logits`: (tokens, experts)."""
    probabilities = logits.softmax(1)
    load = probabilities.argmax(1).bincount(minlength=probabilities.shape[1]).float()
    dist.all_reduce(load)
    return probabilities.shape[1] * (load / load.sum() * probabilities.mean(0)).sum()


@EXERCISE.trial
def trial(t: Trial, tokens: int, experts: int) -> None:
    """Call it, and compare value and gradient."""
    n = t.world_size
    # No two experts have the same logit, and each rank prefers another one.
    each = [t.numbers(tokens, experts, of=rank) / 40 + torch.arange(experts) / 100 for rank in range(n)]
    for rank, logits in enumerate(each):
        logits[:, rank % experts] += 1
    load = torch.stack([logits.argmax(1).bincount(minlength=experts) for logits in each]).float()
    logits = each[t.rank].clone().requires_grad_()
    found = t.call(logits)
    plain = each[t.rank].clone().requires_grad_()
    probabilities = plain.softmax(1)
    share, own = load.sum(0) / load.sum(), load[t.rank] / tokens
    expected = experts * (share * probabilities.mean(0)).sum()
    known = {
        "f is to be a share of the tokens, not their number": expected * load.sum(),
        "the sum over the experts, and not yet times their number": expected / experts,
        "f and P both from the probabilities: f counts the likeliest": experts * probabilities.mean(0).square().sum(),
    }
    known["f of this rank's tokens only"] = experts * (own * probabilities.mean(0)).sum()
    known["f was divided by this rank's tokens, and counts those of all"] = expected * n
    t.equal("the loss", found, expected.detach(), None, {said: wrong.detach() for said, wrong in known.items()})
    t.require(found.requires_grad, "the loss has no gradient: P must be computed from `logits`")
    expected.backward()
    t.watch(found.backward)
    t.require(logits.grad is not None, "the loss does not depend on `logits`")
    t.equal("logits.grad", logits.grad, plain.grad, tolerance=1e-4)
    t.reduced_once(": of f, and P is this rank's own")


@EXERCISE.best
def best(world_size: int, tokens: int, experts: int) -> Cost:
    """Return an all-reduce of a number for each expert."""
    return Cost.all_reduce(4 * experts, world_size)
