"""Measure what the guide's figures.md quotes of the launcher: `make benchmarks`.

Every figure is a ratio within one run, or said with its spread; nothing here is a test.

1. Lesson 04's job (DDP, ConvNet, 2 ranks, 2 epochs) by `labkit.launch` against the same function under a bare
   `mp.spawn` script, from launch to end: the ratio of medians of interleaved repeats.
2. The share of `finished` in a row of launches.

What log calls cost: `log_cost.py`.

    python -m tests.benchmarks.launch --root /path/to/data --dataset mnist
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import labkit

sys.path.append(str(Path(__file__).parents[2] / "notebooks"))  # where the course lies

import course  # noqa: E402

BATCH_SIZE, LR, EPOCHS, WORLD_SIZE = 48, 0.03, 2, 2


def job(rank: int, world_size: int, dataset: str, root: str | None, log: Any) -> float:
    """Train as lesson 04 does; give the test accuracy."""
    train_set, test_set = course.datasets.load(dataset, root)
    sampler = DistributedSampler(train_set, seed=0, drop_last=True)
    loader = DataLoader(train_set, BATCH_SIZE // world_size, sampler=sampler, drop_last=True)
    torch.manual_seed(0)
    model = DistributedDataParallel(course.models.ConvNet())
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0, total_iters=EPOCHS * len(loader))
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            log(loss.item(), len(images))
    model.eval()
    right = torch.zeros(())
    with torch.no_grad():
        mine = torch.utils.data.Subset(test_set, range(rank, len(test_set), world_size))
        for images, labels in DataLoader(mine, 500):
            right += (model.module(images).argmax(1) == labels).sum()
    dist.all_reduce(right)
    return right.item() / len(test_set)


def under_labkit(worker: labkit.Worker, dataset: str, root: str | None) -> float:
    """Run the job as a reader of the lab would."""
    return job(worker.rank, worker.world_size, dataset, root, lambda loss, n: worker.log(loss=loss, samples=n))


def bare(rank: int, world_size: int, port: int, dataset: str, root: str | None) -> None:
    """Run the job as a plain script would, keeping each rank's losses in a list."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world_size))
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    losses: list[tuple[float, int]] = []
    job(rank, world_size, dataset, root, lambda loss, n: losses.append((loss, n)))
    # destroy_process_group and an ordinary exit abort now and then (SIGABRT) after the work is done.
    os._exit(0)


def free_port() -> int:
    """Give a port that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def compare_with_bare_spawn(dataset: str, root: str | None) -> None:
    """Time both, interleaved."""
    times: dict[str, list[float]] = {"labkit.launch": [], "bare mp.spawn": []}
    accuracy = []
    for repeat in range(5):
        for name in sorted(times, reverse=bool(repeat % 2)):
            start = time.perf_counter()
            if name == "labkit.launch":
                run = labkit.launch(under_labkit, dataset, root, world_size=WORLD_SIZE, live=False)
                accuracy.append(run.results[0])
            else:
                mp.spawn(bare, args=(WORLD_SIZE, free_port(), dataset, root), nprocs=WORLD_SIZE)
            times[name].append(time.perf_counter() - start)
    for name, values in times.items():
        print(f"{name}: median {statistics.median(values):.2f} s of {', '.join(f'{v:.2f}' for v in values)}")
    ratio = statistics.median(times["labkit.launch"]) / statistics.median(times["bare mp.spawn"])
    print(f"{dataset}, {EPOCHS} epochs, {WORLD_SIZE} ranks: ratio {ratio:.3f}, test accuracy {min(accuracy):.4f}")


def little(worker: labkit.Worker) -> int:
    """Do one DDP step, the least that can go wrong at exit."""
    model = DistributedDataParallel(nn.Linear(8, 8))
    model(torch.randn(4, 8)).sum().backward()
    worker.log(loss=0.0)
    return worker.rank


def launches_in_a_row(count: int) -> None:
    """Count how many launches end as "finished"."""
    ended = [labkit.launch(little, world_size=2, live=False).status for _ in range(count)]
    print(f"{ended.count('finished')} of {count} launches in a row finished")


def main() -> None:
    """Run both and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="digits")
    parser.add_argument("--root", default=None)
    options = parser.parse_args()
    compare_with_bare_spawn(options.dataset, options.root)
    launches_in_a_row(30)


if __name__ == "__main__":
    main()
