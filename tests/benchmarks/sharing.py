"""Have several processes of a benchmark's program share its work, which is mostly waiting."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path


def share_out(what: str, total: int, processes: int, seed: int, *options: str) -> int:
    """Run this program in so many processes, each for a share of the work and with a seed of its own.

    Args:
        what: The program's option that says how much there is to do, without its hyphens.
        total: How much there is to do in total.
        processes: How many share it.
        seed: The first one's; the others have the seeds that follow.
        options: What each is given besides.

    Returns:
        The greatest exit code. What the processes print is printed, and the sum of the counts that each prints, as
        JSON, in its last line.
    """
    code, count = 0, Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        running = {}
        for number in range(processes):
            share = total // processes + (number < total % processes)
            command = [sys.executable, sys.argv[0], f"--{what}={share}", f"--seed={seed + number}", *options]
            file = Path(folder) / str(number)
            with file.open("w") as printed:
                running[file] = subprocess.Popen(command, stdout=printed)
        for file, process in running.items():
            code = max(code, abs(process.wait()))
            *said, last = file.read_text().splitlines() or [""]
            print(*said, sep="\n", end="\n" if said else "", flush=True)
            count.update(json.loads(last) if last.startswith("{") else {"processes that failed": 1})
    print(json.dumps(count), flush=True)
    return code
