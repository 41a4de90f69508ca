"""Measure what PyTorch's flight recorder, by which a hang's report names collectives, costs a step of 1 ms.

The same calls are made with the recorder on, as labkit leaves it, and off (TORCH_FR_BUFFER_SIZE=0), by processes that
take turns, each a group of one rank, so that nobody waits for anybody: what differs is the recorder. The least of many
rounds counts, as other work on the machine only ever adds. The exit code is 1 above the share given.

    python tests/benchmarks/recorder.py --calls 1
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time

STEP_S = 1e-3
CALLS = {
    "all_reduce, float32 [1]": "dist.all_reduce(one)",
    "all_reduce, float32 [16384]": "dist.all_reduce(many)",
    "barrier": "dist.barrier()",
}
ROUNDS, AT_ONCE = 300, 50


def measure() -> None:
    """Print the least µs of each call, in this process."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    one, many = torch.ones(1), torch.ones(16_384)
    for code in CALLS.values():
        call = eval(f"lambda: {code}", {"dist": dist, "one": one, "many": many})
        took_s = []
        for _ in range(ROUNDS):
            began_s = time.perf_counter()
            for _ in range(AT_ONCE):
                call()
            took_s.append((time.perf_counter() - began_s) / AT_ONCE)
        print(1e6 * min(took_s))
    sys.stdout.flush()
    os._exit(0)


def run_once(size: str) -> list[float]:
    """Return the least µs of each call in a new process, with a recorder that keeps so many calls."""
    command = [sys.executable, __file__, "--measure"]
    environment = {**os.environ, "TORCH_FR_BUFFER_SIZE": size}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120)
    return [float(line) for line in done.stdout.split()]


def main() -> int:
    """Print a table; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=1, help="of collectives in a step")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--most", type=float, default=0.01, help="share of the step that it may cost")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure()
    turns = [(run_once("2000"), run_once("0")) for _ in range(options.turns)]
    on_us, off_us = (list(map(min, zip(*(turn[i] for turn in turns), strict=True))) for i in (0, 1))
    plural = "" if options.calls == 1 else "s"
    print(
        f"| call | recorded | not recorded | of a 1 ms step with {options.calls} call{plural} |\n|---|---:|---:|---:|"
    )
    shares = [options.calls * (on - off) * 1e-6 / STEP_S for on, off in zip(on_us, off_us, strict=True)]
    for call, on, off, share in zip(CALLS, on_us, off_us, shares, strict=True):
        print(f"| {call} | {on:.1f} µs | {off:.1f} µs | {share:.2%} |")
    return 0 if max(shares) <= options.most else 1


if __name__ == "__main__":
    sys.exit(main())
