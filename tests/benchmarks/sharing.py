"""Have several processes of a benchmark's program share its work, which is mostly waiting."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path


def share_out(processes: int) -> int:
    """Run this program again in so many processes, with the options that it was given, and `--share=N` from 0.

    Returns:
        The greatest exit code. What the processes print is printed, and the sum of the counts that each prints, as
        JSON, in its last line.
    """
    code, count = 0, Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        running = {}
        for number in range(processes):
            file = Path(folder) / str(number)
            with file.open("w") as printed:
                running[file] = subprocess.Popen([sys.executable, *sys.argv, f"--share={number}"], stdout=printed)
        for file, process in running.items():
            code = max(code, abs(process.wait()))
            *said, last = file.read_text().splitlines() or [""]
            print(*said, sep="\n", end="\n" if said else "", flush=True)
            count.update(json.loads(last) if last.startswith("{") else {"processes that failed": 1})
    print(json.dumps(count), flush=True)
    return code
