"""Measure what logging three names in every step costs two ranks that train, the notebook's reading included.

Blocks of steps with log calls and blocks without take turns on each rank: the ratio of two neighbours counts.
CPU time per call, the rank's and the notebook's, hardly depends on what else the machine does.

    python -m tests.benchmarks.log_cost
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from torch import nn

import labkit

STEPS = 40
"""In a block, which takes some 60 ms."""
PAIRS = 120
"""Of blocks: one block of each pair logs."""


def train(worker: Any, logs: bool) -> tuple[list[float], float, float]:
    """Return the ratios of the pairs of blocks, a step's time in s, and the rank's CPU time a call in s."""
    model = nn.parallel.DistributedDataParallel(nn.Linear(784, 10))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    x, y = torch.randn(64, 784), torch.randint(0, 10, (64,))

    def block(logs: bool) -> tuple[float, float]:
        began_s, cpu_s = time.perf_counter(), time.process_time()
        for _ in range(STEPS):
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            value = loss.item()
            if logs:
                worker.log(loss=value, accuracy=value, lr=0.01)
        return time.perf_counter() - began_s, time.process_time() - cpu_s

    ratios, steps_s, cpu_s = [], [], 0.0
    for pair in range(-3, PAIRS):
        # Which of them comes first takes turns, too.
        found = {with_log: block(logs and with_log) for with_log in ((False, True) if pair % 2 else (True, False))}
        if pair >= 0:
            ratios.append(found[True][0] / found[False][0])
            steps_s.append(found[False][0] / STEPS)
            cpu_s += found[True][1] - found[False][1]
    return ratios, statistics.median(steps_s), cpu_s / PAIRS / STEPS


def main() -> None:
    """Print each figure."""
    cpu_s = {}
    with labkit.Session(2) as ranks:
        for logs in (True, False):
            began_s = time.process_time()
            run = labkit.launch(train, logs, on=ranks, live=False)
            cpu_s[logs] = time.process_time() - began_s
            ratios, steps_s, rank_s = zip(*run.results, strict=True)
            kind = "with log" if logs else "with no log at all"
            print(f"{kind}, block to block: {statistics.median(sum(ratios, [])):.3f}")
            if logs:
                print(f"a step: {1e3 * statistics.median(steps_s):.2f} ms")
                print(f"a rank's CPU a call: {1e6 * statistics.median(rank_s):.1f} µs")
    notebook_s = (cpu_s[True] - cpu_s[False]) / (2 * PAIRS * STEPS)
    print(f"the notebook's CPU a call: {1e6 * notebook_s:.1f} µs")


if __name__ == "__main__":
    main()
