"""Measure runs on a Ray cluster of two nodes on this machine; nothing here is a test.

1. Seconds from `labkit.launch(…, on=labkit.Ray(…))` until Ray has placed the ranks, and to the first logged value that
   the notebook sees.
2. The delay of a logged value: from `worker.log` to its presence in the run's history. Ranks log the time.
3. With `--trials N`: each way to fail of `tests/support/failures.py`, N times, the failing rank in turn.

    python -m tests.benchmarks.on_ray --launches 5 --values 400 --trials 20
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time

import labkit
from tests.benchmarks.cluster import delays_s, first_value_s, print_delays, print_launches
from tests.benchmarks.failures import chosen, in_a_row, try_once
from tests.support import ray_nodes
from tests.support.failures import ROWS


def try_failures(on: labkit.Ray, trials: int, rows: list[str]) -> None:
    """Print a table of how often the rank that failed was named."""
    print("| way to fail | right rank named | median s | greatest s |\n|---|---|---|---|", flush=True)
    done = []
    for row in rows:
        these = [try_once(row, 2, rank, on) for rank in itertools.islice(itertools.cycle((0, 1)), trials)]
        for wrong in (one for one in these if not one.right):
            print(f"wrong: {wrong}", file=sys.stderr, flush=True)
        print(in_a_row(row, these), flush=True)
        done += these
    print(in_a_row("**all**", done), flush=True)


def main() -> None:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launches", type=int, default=5)
    parser.add_argument("--values", type=int, default=400, help="that each of two ranks logs")
    parser.add_argument("--trials", type=int, default=0, help="of each way to fail")
    parser.add_argument("--rows", nargs="*", default=[], help="ways to fail; all by default")
    options = parser.parse_args()
    rows = chosen(options.rows)
    ROWS["SIGKILL"] = ROWS["SIGKILL"]._replace(cause="")  # of a rank elsewhere nobody has seen the memory
    print(f"load before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores", flush=True)
    with ray_nodes.running() as nodes:
        began = time.monotonic()
        on = labkit.Ray(2, address=nodes.address, placement="STRICT_SPREAD")
        if options.launches:
            print_launches([first_value_s(on) for _ in range(options.launches)], "ranks placed")
        if options.values:
            print_delays(delays_s(on, options.values))
        if options.trials:
            try_failures(on, options.trials, rows)
        print(f"in all {time.monotonic() - began:.0f} s")
    print(f"load after: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
