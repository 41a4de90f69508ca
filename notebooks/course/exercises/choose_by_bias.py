"""Exercise: top-k experts with DeepSeek's bias, which balances them without a loss."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from course.exercises.base import Cost, Exercise
from course.exercises.trial import Trial

EXERCISE = Exercise(
    lesson="24",
    title="DeepSeek's bias",
    statement="""
    Each token goes to `k` experts. `scores` are the router's for this rank's tokens, (tokens,
    experts); `bias` (experts,) is the same on every rank. Choose by `scores + bias`. But an expert's
    output counts by its *gate*: its score without the bias, divided by the sum over all k that were chosen.
    Then move the bias: up by `speed` for an expert that fewer tokens of all ranks have chosen than
    the mean over the experts, down by `speed` for one that more have chosen, and not at all for the
    mean itself. Return (chosen, gates, bias after the step). One `dist.all_reduce`.
    """,
    hints=(
        "`(scores + bias).topk(k).indices` chooses, and `scores.gather(1, chosen)` is what the gates are made of.",
        "`chosen.flatten().bincount(minlength=experts)` counts; all-reduce it, so that all ranks move the bias alike.",
        "`speed * (load.mean() - load).sign()` is added, to a new tensor.",
    ),
    why="The bias decides which experts are chosen and not how much each counts, so it balances without a "
    "gradient that competes with the loss (DeepSeek-V3).",
    allowed=("all_reduce",),
    cases=(
        {"tokens": 6, "experts": 4, "k": 2, "speed": 0.01},
        {"tokens": 7, "experts": 6, "k": 3, "speed": 0.5},
    ),
)


@EXERCISE.reference
def choose_by_bias(scores, bias, k, speed):
    """Return (chosen (tokens, k), gates (tokens, k), bias (experts,) after the step)."""
    chosen = (scores + bias).topk(k).indices
    gates = scores.gather(1, chosen)
    load = chosen.flatten().bincount(minlength=len(bias)).float()
    dist.all_reduce(load)
    return chosen, gates / gates.sum(1, keepdim=True), bias + speed * (load.mean() - load).sign()


def _scores(t: Trial, rank: int, tokens: int, experts: int) -> torch.Tensor:
    """Return scores of which no two are equal in a row."""
    logits = t.numbers(tokens, experts, of=rank, salt="scores") / 40 + torch.arange(experts) / 100
    return logits.softmax(1)


def _by_expert(chosen: torch.Tensor, gates: torch.Tensor, experts: int) -> torch.Tensor:
    """Return (tokens, experts), in whatever order the experts of a token were given."""
    return torch.zeros(len(chosen), experts).scatter(1, chosen, gates)


@EXERCISE.trial
def trial(t: Trial, tokens: int, experts: int, k: int, speed: float) -> None:
    """Call it, and compare with all ranks' tokens."""
    n = t.world_size
    scores = [_scores(t, rank, tokens, experts) for rank in range(n)]
    bias = torch.arange(experts) % 3 * 0.1 + torch.arange(experts) / 1000
    every = [(each + bias).topk(k).indices for each in scores]
    load = torch.stack([chosen.flatten().bincount(minlength=experts) for chosen in every]).float()
    mine, given = scores[t.rank].clone(), bias.clone()
    found = t.call(mine, given, k, speed)
    t.returned(found, "(chosen, gates, bias)")
    t.unchanged("scores", mine, scores[t.rank])
    t.unchanged("bias", given, bias)
    chosen, gates, moved = found
    _check_chosen(t, chosen, scores[t.rank], every[t.rank], k)
    right, biased = scores[t.rank].gather(1, every[t.rank]), (scores[t.rank] + bias).gather(1, every[t.rank])
    known = {
        "the scores of the chosen, which do not add up to 1 yet": right,
        "the bias has a part in the gates": biased / biased.sum(1, keepdim=True),
        "softmax of the scores, not their shares": right.softmax(1),
    }
    whole = {said: _by_expert(every[t.rank], wrong, experts) for said, wrong in known.items()}
    t.require(
        isinstance(gates, torch.Tensor) and gates.shape == right.shape,
        f"`gates` is {tuple(gates.shape) if isinstance(gates, torch.Tensor) else gates!r}, expected shape "
        f"{tuple(right.shape)}",
    )
    expected = _by_expert(every[t.rank], right / right.sum(1, keepdim=True), experts)
    t.equal("the gates, by expert", _by_expert(chosen, gates.float(), experts), expected, None, whole)
    missing = load.sum(0).mean() - load.sum(0)
    known = {
        "the popular go up, the others down": bias - speed * missing.sign(),
        "moved by the difference, not by its sign": bias + speed * missing,
    }
    known["by the choices of this rank only"] = bias + speed * (load[t.rank].mean() - load[t.rank]).sign()
    t.equal("bias", moved, bias + speed * missing.sign(), bias, known)


def _check_chosen(t: Trial, chosen: Any, scores: torch.Tensor, expected: torch.Tensor, k: int) -> None:
    is_right = isinstance(chosen, torch.Tensor) and chosen.shape == expected.shape
    t.require(is_right, f"`chosen` is to be a tensor of shape {tuple(expected.shape)}, got {type(chosen).__name__}")
    found = chosen.sort(1).values
    said = (
        ": chosen by the scores without the bias" if torch.equal(found, scores.topk(k).indices.sort(1).values) else ""
    )
    wanted = expected.sort(1).values
    t.require(torch.equal(found, wanted), f"`chosen` is {found.tolist()}, expected {wanted.tolist()}{said}")


@EXERCISE.best
def best(world_size: int, tokens: int, experts: int, k: int, speed: float) -> Cost:
    """Return an all-reduce of a number for each expert."""
    return Cost.all_reduce(4 * experts, world_size)
