"""Kill a training at random moments, resume it, and count how often it ends as if it had never been killed.

Each trial kills a run of its own, then launches the same function again until it ends, and compares every rank's
weights, optimizer, scheduler and random states with those of an uninterrupted run, bit by bit. Half of the kills come
from outside at a random moment; the other half hit one rank at a random operation on the files of a checkpoint. Then
it measures what a save costs.

    python tests/benchmarks/checkpoint.py --trials 50 --seed 0
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # started by its path, as a program, it finds the training too

import labkit  # noqa: E402
from tests.support.resumable import kill, train  # noqa: E402


class Trial(NamedTuple):
    """One killed run, and how it went on."""

    seed: int
    world_size: int
    how: dict[str, Any]
    """As `tests.support.resumable.kill` takes it."""
    killed: bool
    """The kill came before the run's end."""
    while_writing: bool
    """It left a checkpoint that was not finished."""
    checkpoints: int
    """Whole ones that were there to go on from."""
    damaged: int
    identical: bool


def fingerprints(folder: Path, world_size: int) -> list[str]:
    """Train to the end, from wherever the folder's checkpoints are; give each rank's fingerprint."""
    return [result[0] for result in labkit.launch(train, folder, world_size=world_size, live=False).results]


def try_once(seed: int, world_size: int, expected: list[str]) -> Trial:
    """Kill a run once, as the seed says, and resume it."""
    dice = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="labkit-") as name:
        folder = Path(name)
        rank = dice.randrange(world_size)
        options: dict[str, Any]
        if seed % 2:
            ranks = list(range(world_size)) if dice.random() < 0.5 else [rank]
            options = {"ranks": ranks, "after_steps": dice.randrange(30 // world_size), "delay_s": dice.random() / 10}
        else:
            options = {"die": (rank, dice.randrange(1, 60 if rank else 250))}
        killed = kill(folder, world_size, **options)
        writing = any(path.name.startswith(".") for path in folder.iterdir())
        found = labkit.checkpoint.checkpoints(folder)
        damaged = sum(bool(saved.damage) for saved in found)
        identical = fingerprints(folder, world_size) == expected
    return Trial(seed, world_size, options, killed, writing, len(found) - damaged, damaged, identical)


def cost_ms(worker: Any, folder: str, width: int, saves: int = 20) -> tuple[float, float, int]:
    """Median ms of a save, of writing and syncing as many bytes plainly, and the bytes of a checkpoint."""
    network = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
    model = DistributedDataParallel(network)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(4, width)).sum().backward()
    optimizer.step()
    checkpoint = labkit.Checkpoint(folder, keep=1, model=model, optimizer=optimizer)
    saved, plain = [], []
    for _ in range(saves):
        start = time.perf_counter()
        path = checkpoint.save()
        saved.append(1000 * (time.perf_counter() - start))
        if worker.rank == 0:
            size = sum(file.stat().st_size for file in path.rglob("*"))
            start = time.perf_counter()
            with open(Path(folder) / "plain", "wb") as file:
                torch.save({"model": network.state_dict(), "optimizer": optimizer.state_dict()}, file)
            plain.append(1000 * (time.perf_counter() - start))
        torch.distributed.barrier()
    return (statistics.median(saved), statistics.median(plain), size) if worker.rank == 0 else (0, 0, 0)


def main() -> None:
    """Try every seed, print each trial as it ends and the count, keep all trials."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0, help="of the first trial; the others follow")
    parser.add_argument("--world-sizes", default="2", help="from three on, DDP adds in another order after a resume")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "checkpoint.json")
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    world_sizes = [int(size) for size in options.world_sizes.split(",")]
    with tempfile.TemporaryDirectory(prefix="labkit-") as name:
        expected = {size: fingerprints(Path(name) / str(size), size) for size in world_sizes}
    trials: list[Trial] = []
    for index in range(options.trials):
        world_size = world_sizes[index // 2 % len(world_sizes)]
        trials.append(try_once(options.seed + index, world_size, expected[world_size]))
        print(trials[-1], flush=True)
        options.out.write_text(json.dumps([trial._asdict() for trial in trials], indent=1))
    count = {name: sum(bool(getattr(t, name)) for t in trials) for name in ("identical", "killed", "while_writing")}
    print(
        f"seeds {options.seed} to {options.seed + options.trials - 1}: {count['identical']} of {len(trials)} resumed "
        f"bit-identically; {count['killed']} were killed before their end, {count['while_writing']} while a checkpoint "
        f"was being written or removed; {sum(t.damaged for t in trials)} checkpoints damaged"
    )
    for width in (64, 1024):
        with tempfile.TemporaryDirectory(prefix="labkit-") as folder:
            run = labkit.launch(cost_ms, folder, width, world_size=2, live=False)
        save, plain, size = run.results[0]
        print(f"a checkpoint of {size / 1e6:.1f} MB, 2 ranks: {save:.0f} ms; torch.save without sync {plain:.0f} ms")


if __name__ == "__main__":
    main()
