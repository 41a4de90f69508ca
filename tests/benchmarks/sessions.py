"""Measure launches in a row: on reserved ranks, beside fresh ranks, standby ranks and a plain script of `mp.spawn`.

Each figure is the time from the call of `labkit.launch` until the last rank has taken its first DDP step: both clocks
are the machine's. Launches follow each other at once, but for standby ranks, which are given the time to be spawned.
What is compared with the plain script takes turns with it.

    python -m tests.benchmarks.sessions
"""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import labkit
from labkit.engines import standby

RANKS = 2


def first_step(worker: labkit.Worker) -> float:
    """Take one DDP step; return when it was done, as `time.time()`."""
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 10).to(worker.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loss = model(torch.randn(32, 64, device=worker.device)).pow(2).mean()
    loss.backward()
    optimizer.step()
    done_s = time.time()
    worker.log(loss=loss.item())
    return done_s


def launches(count: int, before: Callable[[], Any] = lambda: None, on: labkit.Session | None = None) -> list[float]:
    """Return the seconds from each launch to the first step on all its ranks."""
    found = []
    for _ in range(count):
        before()
        start_s = time.time()
        run = labkit.launch(first_step, on=on, world_size=RANKS, live=False)
        found.append(max(run.results) - start_s)
    return found


def typing_mistake(worker: labkit.Worker) -> None:
    """Fail as a cell does whose mistake is mended and which is run again at once."""
    raise NameError("name 'optimiser' is not defined")


def fail_once() -> None:
    """Launch what fails."""
    with contextlib.suppress(labkit.WorkerFailed):
        labkit.launch(typing_mistake, world_size=RANKS, live=False)


@contextlib.contextmanager
def bare_spawn() -> Iterator[Callable[[], float]]:
    """Give what starts ranks by `mp.spawn`, in a process that knows nothing of labkit."""
    script = Path(__file__).with_name("bare_spawn.py")
    with subprocess.Popen([sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as bare:
        assert bare.stdin is not None
        assert bare.stdout is not None
        requests, answers = bare.stdin, bare.stdout

        def spawn() -> float:
            print(RANKS, file=requests, flush=True)
            return float(answers.readline())

        yield spawn
        requests.close()


def in_pairs(title: str, before: Callable[[], Any] = lambda: None, settle: Callable[[], Any] = lambda: None) -> None:
    """Launch and spawn in turns; print both and their ratio.

    `before` comes right before each launch, and `settle` before each pair, until nothing begins in the background.
    """
    ours, bare = [], []
    with bare_spawn() as spawn:
        for _ in range(7):
            settle()
            bare.append(spawn())
            ours += launches(1, before)
    report(title, ours)
    report("    beside a plain script of mp.spawn", bare)
    print(f"    ratio of medians {statistics.median(ours) / statistics.median(bare):.2f}", flush=True)


def wait_for_standby() -> None:
    """Wait until ranks stand by, ready."""
    deadline = time.monotonic() + 120
    while not standby.warm() and time.monotonic() < deadline:
        time.sleep(0.05)


def report(title: str, seconds: list[float]) -> None:
    """Print one row."""
    worst, rest = max(seconds), sorted(seconds)
    at_90 = rest[min(len(rest) - 1, int(0.9 * len(rest)))]
    print(
        f"{title:44} {len(seconds):3} launches: median {statistics.median(seconds):.3f} s, 90 % within {at_90:.3f} s, "
        f"worst {worst:.3f} s",
        flush=True,
    )


def main() -> None:
    """Measure and print."""
    with labkit.Session(RANKS) as ranks:
        report("reserved ranks, the first launch on them", launches(1, on=ranks))
        report("reserved ranks", launches(50, on=ranks))
    standby.off()
    in_pairs("fresh ranks (standby off)")
    standby.on()
    launches(1)
    in_pairs("right after a launch that failed", fail_once, wait_for_standby)
    launches(1)
    report("standby ranks, when they are ready", launches(5, wait_for_standby))
    standby.off()


if __name__ == "__main__":
    main()
