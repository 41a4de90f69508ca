"""Train the GPT by every strategy: how far from one process, how many bytes, how much memory.

Float64, dropout, ragged sequences, five steps of AdamW; bf16 in float32. Bytes are what the system counted, a step's
mean over the ranks without the first, which sets things up.

    python -m tests.benchmarks.transformer --ranks 2 4 8
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import labkit
from course.transformer import ALL, BF16, GPT, ExpertParallel, GPTStrategy, OneProcess, batches, mean_loss, text
from labkit import profiling
from labkit.comparison import benchmark

OPTIMIZER = functools.partial(torch.optim.AdamW, lr=1e-2)
BATCH_SIZE, TIME, STEPS = 8, 64, 5


class Found(NamedTuple):
    """What one rank found out about a strategy."""

    weights: dict[str, Tensor]
    losses: list[float | None]
    sent: float
    expected: float
    memory: dict[str, int]
    marks: set[str]


def depth_for(world_size: int) -> int:
    """Blocks enough for two stages on each rank."""
    return 8 if world_size > 2 else 4


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
        clock = profiling.Clock(worker.device)
        trainer = strategy(worker, network(strategy, depth, experts), mean_loss, optimizer, clock)
        losses, sent = [], [0]
        stream = batches(data, BATCH_SIZE, TIME, ragged=True)
        for inputs, targets in itertools.islice(stream, STEPS):
            before = profiling.bytes_sent()
            with clock.step():
                loss = trainer.step(inputs, targets)
            losses.append(None if loss is None else loss.item())
            sent.append(profiling.bytes_sent() - before)
        weights = {name: weight.detach().clone() for name, weight in trainer.weights().items()}
        with profiling.activations(trainer.model) as kept:
            trainer.step(inputs, targets)
        memory = {**profiling.tensor_bytes(trainer.model, trainer.optimizer), **kept}
        marks = {mark.what for mark in clock.steps[-1]}
        expected = trainer.bytes_expected(BATCH_SIZE)
        found[strategy.title] = Found(weights, losses, statistics.fmean(sent[2:]), expected, memory, marks)
        dist.barrier()
    return found


def reference(worker: labkit.Worker, *args: Any) -> dict[str, Found]:
    """Train by one process, with double precision."""
    return train_all(worker, [OneProcess], *args)


def strategies_for(world_size: int) -> list[type[GPTStrategy]]:
    """Return those that run on so many ranks; of more than four ranks, those that need them."""
    return [s for s in ALL.values() if s.ranks(world_size) == world_size and (world_size <= 4 or s.ranks(4) > 4)]


def of_all(ranks: labkit.Session, world_size: int) -> dict[str, dict[str, float]]:
    """Return a row of figures for every strategy that runs on so many ranks."""
    depth, data = depth_for(world_size), text()
    strategies = strategies_for(world_size)
    run = labkit.launch(train_all, strategies, data, depth, on=ranks, world_size=world_size, live=False)
    alone = {
        experts: labkit.launch(reference, data, depth, experts, on=ranks, world_size=1, live=False).results[0]
        for experts in (0, 4)
    }
    rows = {}
    for strategy in strategies:
        one = alone[4 if issubclass(strategy, ExpertParallel) else 0]
        found = [result[strategy.title] for result in run.results]
        weights = {name: tensor for each in found for name, tensor in each.weights.items()}
        sent, expected = (sum(getattr(each, name) for each in found) for name in ("sent", "expected"))
        rows[strategy.title] = {
            "difference": benchmark.difference(one["one process"].weights, weights),
            "sent KiB": sent / world_size / 1024,
            "counted / formula": sent / expected,
            **{f"{what} KiB": max(each.memory[what] for each in found) / 1024 for what in found[0].memory},
        }
    return rows


def main() -> None:
    """Print a table for each number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    options = parser.parse_args()
    labkit.standby.off()
    with labkit.Session(max(options.ranks)) as ranks:
        for world_size in options.ranks:
            rows = of_all(ranks, world_size)
            names = list(next(iter(rows.values())))
            print(f"\n{world_size} ranks, {depth_for(world_size)} blocks\n| strategy | {' | '.join(names)} |")
            print("|---" * (len(names) + 1) + "|")
            for title, row in rows.items():
                figures = [
                    f"{v:.1e}" if k == "difference" else f"{v:.3f}" if "/" in k else f"{v:,.0f}" for k, v in row.items()
                ]
                print(f"| {title} | {' | '.join(figures)} |", flush=True)


if __name__ == "__main__":
    main()
