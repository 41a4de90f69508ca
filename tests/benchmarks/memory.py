"""Measure what a rank takes of the machine's memory, by the number of ranks.

USS, the unique set size, is what one process has for itself alone; PSS adds its share of what processes have in common
(libraries, mostly); RSS counts that in full for every process, and so says little. What one more rank costs is how much
the sum of all PSS grows. Then what a value of 1 GiB costs: as a global of the notebook, and as a result. On Linux only.

    python -m tests.benchmarks.memory
"""

from __future__ import annotations

import resource
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

import labkit
from labkit.engines import standby

GIB = 2**30


class Memory(NamedTuple):
    """Of one process, in bytes."""

    uss: int
    pss: int
    rss: int


def look() -> Memory:
    """Return the memory of this process."""
    with open("/proc/self/smaps_rollup") as lines:
        size = {line.split()[0]: int(line.split()[1]) * 1024 for line in list(lines)[1:]}
    return Memory(size["Private_Clean:"] + size["Private_Dirty:"], size["Pss:"], size["Rss:"])


def step() -> nn.Module:
    """Take the first step of a training with SGD and momentum; the model has 10 MB of parameters."""
    model = nn.parallel.DistributedDataParallel(nn.Linear(1580, 1580))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    model(torch.randn(32, 1580)).pow(2).mean().backward()
    optimizer.step()
    return model


def train(worker: labkit.Worker) -> Memory:
    """Take one step, and look while every rank is there."""
    model = step()
    dist.barrier()
    found = look()
    dist.barrier()
    del model
    return found


def by_ranks(numbers: list[int]) -> None:
    """Print what a rank takes in runs of so many ranks, and what one more costs."""
    print(f"\n{'ranks':>5}{'USS MB a rank':>16}{'PSS MB a rank':>16}{'PSS MB in all':>16}{'one more MB':>14}")
    before = Memory(0, 0, 0), 0
    for count in numbers:
        found: list[Memory] = labkit.launch(train, world_size=count, live=False).results
        uss, pss = (statistics.median(getattr(one, what) for one in found) / 1e6 for what in ("uss", "pss"))
        total = sum(one.pss for one in found)
        more = (total - before[0].pss) / (count - before[1]) / 1e6 if before[1] else float("nan")
        print(f"{count:5}{uss:16.0f}{pss:16.0f}{total / 1e6:16.0f}{more:14.0f}", flush=True)
        before = Memory(0, total, 0), count


def reads_one(worker: labkit.Worker) -> int:
    """Use one number of the large value, and return what the rank has for itself alone."""
    assert LARGE[worker.rank] == 1
    return look().uss


def reads_none(worker: labkit.Worker) -> int:
    """Return the same without the value."""
    return look().uss


def gives(worker: labkit.Worker) -> torch.Tensor:
    """Return as large a value."""
    return torch.ones(GIB // 4)


def large_values(repeats: int) -> None:
    """Print what 1 GiB costs that a function uses, and that it returns."""
    global LARGE
    LARGE = torch.ones(GIB // 4)
    before = look().rss
    with labkit.Session(2) as ranks:
        without = labkit.launch(reads_none, on=ranks, live=False).results
        with_it = labkit.launch(reads_one, on=ranks, live=False).results
        own = max(after - before for before, after in zip(without, with_it, strict=True))
        peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        print(f"\na global of 1 GiB: a rank's own {own / GIB:.2f} GiB; the notebook {peak / before:.2f} x at its peak")
        result_s, copy_s = [], []
        for _ in range(repeats):
            began = time.perf_counter()
            run = labkit.launch(gives, on=ranks, world_size=1, live=False)
            result_s.append(time.perf_counter() - began)
            assert run.results[0][-1] == 1
            del run
            with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
                (Path(folder) / "value").write_bytes(bytes(GIB))
                began = time.perf_counter()
                shutil.copyfile(Path(folder) / "value", Path(folder) / "copy")
                copy_s.append(time.perf_counter() - began)
        result, copied = statistics.median(result_s), statistics.median(copy_s)
        print(
            f"a result of 1 GiB: {result:.2f} s, launch included: {result / copied:.1f} x a copy of its file in memory"
        )


def main() -> None:
    """Run all and print the tables."""
    standby.off()
    print(f"PyTorch {torch.__version__}, Python {sys.version.split()[0]}")
    by_ranks([1, 2, 4, 8])
    large_values(5)


if __name__ == "__main__":
    main()
