"""Have several processes of a benchmark share its work, which is mostly waiting, and keep what came of it."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any


class Results:
    """What came of cases so far, in a file with a line of JSON for each, or nowhere."""

    def __init__(self, file: Path | None) -> None:
        self._file = file

    def were_right(self) -> set[str]:
        """Return the cases that need not be tried again."""
        if self._file is None or not self._file.exists():
            return set()
        tried = map(json.loads, self._file.read_text().splitlines())
        return {each["case"] for each in tried if each["right"]}

    def add(self, case: str, is_right: bool, **more: Any) -> None:
        """Add what came of a case."""
        if self._file is None:
            return
        with self._file.open("a") as file:  # other processes write to it, too: a line at once
            file.write(json.dumps({"case": case, "right": is_right, **more}) + "\n")


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
