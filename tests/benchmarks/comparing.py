"""Measure whether a comparison's times hold on a busy machine: `computed ms`, as the guide says, and `step ms`.

DDP is compared with one process on two ranks, alone and beside programs that only compute.

    python -m tests.benchmarks.comparing --times 5 --busy 2
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import labkit

TIMES = ["step ms", "computed ms"]


def train(worker, wrap=lambda model: model):
    """Train an MLP of four layers."""
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(768, 768), nn.ReLU())))
    wrapped = wrap(model)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(28):
        optimizer.zero_grad()
        loss = wrapped(torch.randn(256 // worker.world_size, 768)).square().mean()
        loss.backward()
        optimizer.step()
        worker.log(loss=loss)


def ddp(worker):
    """Train it with DDP."""
    train(worker, DistributedDataParallel)


def main() -> None:
    """Print the medians of each time, alone and beside others."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=5, help="how often to compare")
    parser.add_argument("--busy", type=int, default=2, help="programs that only compute")
    options = parser.parse_args()
    with labkit.Session(2) as ranks:
        for busy in (0, options.busy):
            spinning = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(busy)]
            try:
                compared = {"one process": train, "DDP": ddp}
                frames = [
                    labkit.compare(compared, world_size={"one process": 1}, on=ranks, live=False).frame()
                    for _ in range(options.times)
                ]
            finally:
                for process in spinning:
                    process.kill()
                    process.wait()
            for row, title in enumerate(compared):
                medians = (
                    f"{statistics.median(frame[time].iloc[row] for frame in frames):.1f} {time}" for time in TIMES
                )
                print(f"{title}, beside {busy} programs: {', '.join(medians)}", flush=True)


if __name__ == "__main__":
    main()
