"""Measure launch, relaunch, Stop and failure of two checkouts in pairs: what has a change made slower?

Each pair runs this file in fresh processes, once with each checkout's labkit and environment, in turn.

    python tests/benchmarks/pairs.py /path/to/the/other/checkout --pairs 4
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAUSE_S = 2.5
"""Between two launches: what stands by for the next is being made meanwhile."""


def little(worker: Any) -> int:
    """Return at once."""
    return int(worker.rank)


def training(worker: Any) -> None:
    """Log for minutes."""
    for step in range(100_000):
        time.sleep(0.002)
        worker.log(loss=1 / (step + 1))


def stuck(worker: Any) -> None:
    """Log once, and never again."""
    worker.log(loss=1.0)
    while True:
        time.sleep(0.1)


def fails(worker: Any) -> None:
    """Fail on rank 1."""
    worker.log(loss=1.0)
    if worker.rank == 1:
        raise ValueError("as it is meant to")


def measure() -> dict[str, float]:
    """Return the seconds that each takes with the labkit that is imported here."""
    import labkit

    def launched(function: Callable[..., Any]) -> float:
        began_s = time.perf_counter()
        with contextlib.suppress(labkit.WorkerFailed):
            labkit.launch(function, world_size=2, live=False)
        took_s = time.perf_counter() - began_s
        time.sleep(PAUSE_S)
        return took_s

    def stopped(function: Callable[..., Any]) -> float:
        run = labkit.launch(function, world_size=2, live=False, wait=False)
        while any(run.progress(rank)[0].last_step is None for rank in range(2)):
            time.sleep(0.01)
        time.sleep(0.3)
        began_s = time.perf_counter()
        run.stop()
        run.over.wait(60)
        took_s = time.perf_counter() - began_s
        time.sleep(PAUSE_S)
        return took_s

    return {
        "first launch": launched(little),
        "relaunch": statistics.median(launched(little) for _ in range(8)),
        "Stop, training": statistics.median(stopped(training) for _ in range(3)),
        "Stop, stuck": statistics.median(stopped(stuck) for _ in range(2)),
        "failure": statistics.median(launched(fails) for _ in range(5)),
    }


def of(root: Path, script: str, *arguments: str) -> dict[str, float]:
    """Run a script of this folder with the labkit and the environment of a checkout; return the figures it prints."""
    command = [root / ".venv/bin/python", script, *arguments]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run(command, cwd=root, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def in_turns(roots: Sequence[Path], pairs: int, script: str, *arguments: str) -> dict[Path, list[dict[str, float]]]:
    """Return the figures of several checkouts, which are measured in turns, so that what changes meanwhile hits all."""
    found: dict[Path, list[dict[str, float]]] = {root: [] for root in roots}
    for number in range(pairs):
        for root in roots if number % 2 == 0 else roots[::-1]:
            found[root].append(of(root, script, *arguments))
    return found


def main() -> None:
    """Print each figure of both, and the ratios of the pairs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, nargs="?")
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--child", action="store_true")
    given = parser.parse_args()
    if given.child:
        print(json.dumps(measure()))
        return
    found = in_turns([given.other, ROOT], given.pairs, __file__, "--child")
    for title in found[ROOT][0]:
        before, now = ([each[title] for each in found[root]] for root in (given.other, ROOT))
        ratios = ", ".join(f"{b / a:.2f}" for a, b in zip(before, now, strict=True))
        a, b = statistics.median(before), statistics.median(now)
        print(f"{title}: {a:.6f} and {b:.6f} s, {b / a:.2f} ×; by pair {ratios}", flush=True)


if __name__ == "__main__":
    main()
