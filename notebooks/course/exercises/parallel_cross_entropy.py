"""Exercise: cross-entropy over a vocabulary that lies in parts on the ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from course.exercises.base import Cost, Exercise
from course.exercises.trial import Trial

EXERCISE = Exercise(
    lesson="21",
    title="Cross-entropy over a vocabulary in parts",
    statement="""
    Each rank has some columns of the logits: rank r those of the `size` tokens from r · size on, for every token.
    Return the mean cross-entropy over the tokens, on every rank. Gathering the logits would send the whole
    vocabulary; three all-reduces of one number per token are enough. Logits may be large: subtract the largest
    before you take the exponential.
    """,
    hints=(
        "The loss of a token is log(sum of exp(logits)) − the target's logit.",
        "The greatest logit over all ranks: `dist.all_reduce(greatest, dist.ReduceOp.MAX)`.",
        "Only one rank has the target's logit. Let the others put 0 there, and add up.",
    ),
    why="Greatest, sum and target are each one number a token, and each can be put together from the ranks' own.",
    allowed=("all_reduce",),
    cases=({"tokens": 9, "size": 3}, {"tokens": 4, "size": 1}),
)


@EXERCISE.reference
def parallel_cross_entropy(logits, targets, rank):
    """Return the mean loss, shape (). `logits` are this rank's, (tokens, size); `targets` (tokens,), of all."""
    size = logits.shape[1]
    greatest = logits.max(1).values
    dist.all_reduce(greatest, dist.ReduceOp.MAX)
    total = (logits - greatest[:, None]).exp().sum(1)
    dist.all_reduce(total)
    column = targets - rank * size
    is_mine = (column >= 0) & (column < size)
    picked = logits.gather(1, column.clamp(0, size - 1)[:, None]).squeeze(1) * is_mine
    dist.all_reduce(picked)
    return (total.log() + greatest - picked).mean()


@EXERCISE.trial
def trial(t: Trial, tokens: int, size: int) -> None:
    """Call it, and compare with the loss over the whole vocabulary."""
    n = t.world_size
    parts = [(t.numbers(tokens, size, of=rank, salt="logits") - 50) * 4 / 10 for rank in range(n)]
    parts = [part + 60 * (rank + 1) * (t.case + 1) / n for rank, part in enumerate(parts)]  # exp() of that overflows
    # Every token once, at least, the first and the last of every part among them.
    targets = torch.arange(tokens) * (1 if size * n <= tokens else 2) % (size * n)
    given = parts[t.rank].clone()
    found = t.call(given, targets.clone(), t.rank)
    whole = torch.cat(parts, 1)
    known = {"not a mean over the tokens, but their sum": cross_entropy(whole, targets, reduction="sum")}
    column = targets - t.rank * size
    own = parts[t.rank].gather(1, column.clamp(0, size - 1)[:, None])[:, 0] * ((column >= 0) & (column < size))
    total = whole.logsumexp(1)
    clamped = sum(
        part.gather(1, (targets - rank * size).clamp(0, size - 1)[:, None])[:, 0] for rank, part in enumerate(parts)
    )
    known["only the rank that has a target knows its logit"] = (total - own).mean()
    known["ranks that do not have the target's logit add another one"] = (total - clamped).mean()
    known["this rank's part of the vocabulary only"] = (parts[t.rank].logsumexp(1) - own).mean()
    t.equal("the loss", found, cross_entropy(whole, targets), None, known, tolerance=1e-4)
    t.unchanged("logits", given, parts[t.rank])
    sent, least = t.traffic.bytes_sent, best(n, tokens, size).bytes
    t.require(sent <= least, f"{sent} B sent, expected {least} B: three numbers a token")


@EXERCISE.best
def best(world_size: int, tokens: int, size: int) -> Cost:
    """Return three all-reduces of one number a token."""
    return Cost.all_reduce(4 * tokens, world_size, calls=3)
