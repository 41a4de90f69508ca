"""Measure runs on SLURM, on this machine; nothing here is a test.

1. Seconds from `labkit.launch(…, on=labkit.Slurm(…))` to the first logged value that the notebook sees.
2. The delay of a logged value: from `worker.log` to its presence in the run's history. Ranks log the time.

    python -m tests.benchmarks.cluster
"""

from __future__ import annotations

import statistics
import tempfile
import time
from typing import Any

import labkit
from tests.support import cluster


def tell_the_time(worker, values, pause_s):
    for _ in range(values):
        worker.log(at_s=time.time())
        time.sleep(pause_s)


def first_value_s(on: Any) -> tuple[float, float]:
    """Return seconds from launch until the launcher has machines for the ranks, and until a value is seen."""
    began = time.monotonic()
    run = labkit.launch(tell_the_time, 1, 0, on=on, wait=False, live=False)
    while run.status == "queued":
        time.sleep(0.005)
    running_s = time.monotonic() - began
    while not run.recorded.names and not run.over.is_set():
        time.sleep(0.005)
    seen_s = time.monotonic() - began
    run.wait()
    return running_s, seen_s


def delays_s(on: Any, values: int) -> list[float]:
    """Return the delay of every value that two ranks log."""
    run = labkit.launch(tell_the_time, values, 0.03, on=on, wait=False, live=False)
    seen = [0, 0]
    found = []
    while not run.over.is_set() or sum(seen) < 2 * values:
        time.sleep(0.001)
        now = time.time()
        for rank in (0, 1):
            steps = run.progress(rank)[0].steps
            if steps > seen[rank]:
                frame = run.history
                found += (now - frame[frame["rank"] == rank]["at_s"].iloc[seen[rank] : steps]).tolist()
                seen[rank] = steps
    run.wait()
    return found


def main() -> None:
    """Measure and print."""
    with tempfile.TemporaryDirectory() as folder, cluster.running():
        time.sleep(4)  # a controller that has just started waits three seconds before its first job
        on = labkit.Slurm(nodes=2, folder=folder)
        times = zip(*(first_value_s(on) for _ in range(5)), strict=True)
        for what, each in zip(("job runs", "first value seen"), times, strict=True):
            print(
                f"launch to {what}: median {statistics.median(each):.2f} s ({min(each):.2f}–{max(each):.2f})",
                flush=True,
            )
        delays = sorted(1000 * delay for delay in delays_s(on, 400))
        p99 = delays[int(0.99 * (len(delays) - 1))]
        print(f"delay of {len(delays)} values: median {statistics.median(delays):.0f} ms, p99 {p99:.0f} ms")


if __name__ == "__main__":
    main()
