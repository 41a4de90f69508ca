"""`python -m tests.benchmarks.comparing`: one process against DDP, by the clock, by the processor's time, by counting.

Each of the networks is compared `times` times on two ranks, beside `busy` programs that only compute:
`python -m tests.benchmarks.comparing 10 2`.
"""

from __future__ import annotations

import subprocess
import sys
import time

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import labkit
from labkit.comparison.compare import compare

COUNTED = ["GFLOP", "sent MiB", "parameters MiB", "gradients MiB", "optimizer MiB", "activations MiB", "buckets MiB"]


def train(worker, width, batch, steps, wrap=lambda model: model):
    """Train an MLP of four layers."""
    torch.manual_seed(0)
    sizes = (64, width, width, width, 10)
    layers = [layer for a, b in zip(sizes, sizes[1:], strict=False) for layer in (nn.Linear(a, b), nn.ReLU())]
    model = nn.Sequential(*layers[:-1])
    wrapped = wrap(model)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        inputs, targets = (
            torch.randn(batch, 64, generator=generator),
            torch.randint(0, 10, (batch,), generator=generator),
        )
        inputs, targets = (each.chunk(worker.world_size)[worker.rank] for each in (inputs, targets))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(wrapped(inputs), targets)
        loss.backward()
        optimizer.step()
        worker.log(loss=loss.item())
    return model.state_dict()


def ddp(worker, width, batch, steps):
    """Train it with DDP."""
    return train(worker, width, batch, steps, DistributedDataParallel)


def main(times: int = 3, busy: int = 0) -> None:
    """Print what is found."""
    spinning = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(busy)]
    try:
        with labkit.Session(2) as ranks:
            for width, batch in ((768, 64), (768, 256), (768, 1024), (1536, 1024)):
                counted = set()
                for _ in range(times):
                    began_s = time.monotonic()
                    options = {"on": ranks, "live": False, "width": width, "batch": batch, "steps": 28}
                    compared = compare({"one process": train, "DDP": ddp}, world_size={"one process": 1}, **options)
                    frame = compared.frame()
                    one_ms, many_ms = frame["step ms"]
                    by_processor = frame["computed ms"].iloc[0] / frame["computed ms"].iloc[1]
                    counted.add(tuple(frame[COUNTED].to_numpy().ravel().tolist()))
                    print(
                        f"width {width}, batch {batch}: {one_ms:.1f} and {many_ms:.1f} ms, {one_ms / many_ms:.2f} × by "
                        f"the clock, {by_processor:.2f} × by processor time; speed-up {frame['speed-up'].iloc[1]:.2f}, "
                        f"difference {frame['difference'].iloc[1]:.0e}, {time.monotonic() - began_s:.1f} s; "
                        f"{compared.doubts()}",
                        flush=True,
                    )
                print(f"  counted columns: {len(counted)} kinds of rows in {times} comparisons", flush=True)
    finally:
        for process in spinning:
            process.kill()
            process.wait()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]))
