"""Measure what a large result costs on its way through a run's folder, against copying a file of its size.

Each repeat measures, one after another: a rank that makes a tensor and returns one number of it; a rank that makes the
same tensor and returns it; the time in which a file of that size is read and written again beside it. The figure is the
difference of the first two, in copies: two runs and a copy within seconds of each other, so that what else the machine
does touches all three.

    python -m tests.benchmarks.results --mb 50 1000 --repeats 3
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import labkit

BLOCK_BYTES = 1 << 24


def make(worker: labkit.Worker, mb: int, returns: bool) -> Any:
    """Make a tensor of so many MB; return it, or one number of it."""
    tensor = torch.zeros(mb * 250_000) + worker.rank
    return tensor if returns else tensor[0].item()


def seconds(action: Callable[[], object]) -> float:
    """Return how long it takes."""
    began_s = time.monotonic()
    action()
    return time.monotonic() - began_s


def copy(source: Path, target: Path) -> None:
    """Read a file and write it again."""
    with open(source, "rb", buffering=0) as read, open(target, "wb", buffering=0) as written:
        while data := read.read(BLOCK_BYTES):
            written.write(data)


def measure(mb: int, folder: Path) -> tuple[float, float]:
    """Return (what the result takes, a copy), in seconds."""
    on = labkit.Torchrun(ranks_per_node=1, folder=folder / "runs")

    def launch(returns: bool) -> None:
        run = labkit.launch(make, mb, returns, on=on, live=False)
        assert not returns or run.results[0].numel() == mb * 250_000

    number, whole = seconds(lambda: launch(False)), seconds(lambda: launch(True))
    source, target = folder / "source", folder / "target"
    source.write_bytes(bytes(range(256)) * (mb * 1_000_000 // 256))
    copy_s = seconds(lambda: copy(source, target))
    source.unlink()
    target.unlink()
    return whole - number, copy_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, nargs="+", default=[50, 1000])
    parser.add_argument("--repeats", type=int, default=3)
    chosen = parser.parse_args()
    print("| result, MB | through torchrun, s | a copy, s | in copies |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory(dir=".") as folder:
        for mb in chosen.mb:
            found = [measure(mb, Path(folder)) for _ in range(chosen.repeats)]
            result_s, copy_s = (statistics.median(times) for times in zip(*found, strict=True))
            print(f"| {mb:,} | {result_s:.2f} | {copy_s:.2f} | {result_s / copy_s:.1f} |", flush=True)


if __name__ == "__main__":
    main()
