"""Train the GPT by every strategy: its weights and losses.

Float64, dropout, ragged sequences, five steps of AdamW; bf16 in float32.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import labkit
from course.transformer import BF16, GPT, ExpertParallel, GPTStrategy, OneProcess, batches

OPTIMIZER = functools.partial(torch.optim.AdamW, lr=1e-2)
BATCH_SIZE, TIME, STEPS = 8, 64, 5


class Found(NamedTuple):
    """What one rank found out about a strategy."""

    weights: dict[str, Tensor]
    losses: list[float | None]


def network(strategy: type[GPTStrategy], depth: int, experts: int = 0) -> GPT:
    torch.manual_seed(0)
    experts = 4 if issubclass(strategy, ExpertParallel) else experts
    model = GPT(depth, width=64, heads=4, dropout=0.1, experts=experts)
    return model if issubclass(strategy, BF16) else model.double()


def train_all(
    worker: labkit.Worker,
    strategies: Sequence[type[GPTStrategy]],
    data: bytes,
    depth: int,
    experts: int = 0,
    optimizer: Callable[..., torch.optim.Optimizer] = OPTIMIZER,
) -> dict[str, Found]:
    """Train by one strategy after the other, in the same ranks."""
    found = {}
    for strategy in strategies:
        trainer = strategy(worker, network(strategy, depth, experts), optimizer)
        losses = []
        stream = batches(data, BATCH_SIZE, TIME, ragged=True)
        for inputs, targets in itertools.islice(stream, STEPS):
            loss = trainer.step(inputs, targets)
            losses.append(None if loss is None else loss.item())
        weights = {name: weight.detach().clone() for name, weight in trainer.weights().items()}
        found[strategy.title] = Found(weights, losses)
        dist.barrier()
    return found


def reference(worker: labkit.Worker, *args: Any) -> dict[str, Found]:
    """Train by one process, with double precision."""
    return train_all(worker, [OneProcess], *args)
