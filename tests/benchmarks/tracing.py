"""Measure what a trace costs, and how well it finds a straggler.

The cost: the steps of one run of which some are traced, in ms (medians over ranks and steps): before, those that are
traced, and after; beside the same steps of a run that is not traced. The straggler: a sleep on one rank, planted again
and again on other ranks and in other places, held against the lateness by the function's own clock.

    python tests/benchmarks/tracing.py --trials 20
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # started by its path, as a program

import labkit  # noqa: E402

TRACED, STEPS = 5, 60
BEFORE, DURING, AFTER = slice(0, 2), slice(3, 8), slice(20, 60)
"""Steps before the profiler starts, those that are traced, and those after all is over; by number."""


def lengths(worker):
    """Train with DDP, and return how long each step took, in s."""
    model = DistributedDataParallel(nn.Sequential(*(nn.Linear(256, 256) for _ in range(8))))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    inputs, taken = torch.randn(64, 256), []
    for _ in range(STEPS):
        began_s = time.perf_counter()
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
        taken.append(time.perf_counter() - began_s)
    return taken


def entering(worker, late, delay_s, where):
    """All-reduce once a step, late on one rank, and return when this rank entered."""
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    if worker.rank == late and where == "forward":
        model.register_forward_pre_hook(lambda *_: time.sleep(delay_s))
    entered = []
    for _ in range(TRACED + 4):
        if worker.rank == late and where == "other":
            time.sleep(delay_s)
        model(torch.ones(4, 8)).sum().backward()
        entered.append(time.time())
        dist.all_reduce(model.weight.grad)
        optimizer.step()
    return entered


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=4)
    options = parser.parse_args()
    with labkit.Session(options.ranks) as ranks:
        print("| ms a step | steps before | traced | after |\n|---|---|---|---|")
        for title, trace in (("without a trace", None), ("with one", TRACED)):
            run = labkit.launch(lengths, on=ranks, world_size=2, trace=trace, live=False)
            cells = [1000 * statistics.median(t for r in run.results for t in r[s]) for s in (BEFORE, DURING, AFTER)]
            print(f"| {title} | {' | '.join(f'{ms:.2f}' for ms in cells)} |", flush=True)
        right, off_ms = 0, []
        places = itertools.cycle((n, rank) for n in range(2, options.ranks + 1) for rank in range(n))
        for (world_size, late), where in zip(places, itertools.cycle(("other", "forward")), strict=False):
            if len(off_ms) == options.trials:
                break
            planted = {"late": late, "delay_s": 0.05, "where": where}
            run = labkit.launch(entering, on=ranks, world_size=world_size, trace=TRACED, live=False, **planted)
            found = run.trace.straggler
            steps = list(zip(*run.results, strict=True))[DURING]
            truth_s = statistics.median(
                step[late] - statistics.median(t for rank, t in enumerate(step) if rank != late) for step in steps
            )
            right += found is not None and (found.rank, found.part) == (late, where)
            off_ms.append(1000 * abs(found.late_s - truth_s) if found is not None else float("inf"))
    print(f"\n50 ms planted: right rank and place in {right} of {len(off_ms)}; off by {max(off_ms):.1f} ms at most")


if __name__ == "__main__":
    main()
