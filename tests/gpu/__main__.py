"""Run the tests of this folder, and write what they found as a table, with hardware and versions.

    python -m tests.gpu --out build/gpu.md        or: make test-gpu

Exits as pytest does: with 0 if all passed.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import sys
from pathlib import Path

import pytest
import torch

import labkit


def hardware() -> str:
    """Return the GPUs of this machine and the versions that matter, in a line."""
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    gpus = " + ".join(f"{names.count(name)} × {name}" for name in dict.fromkeys(names)) or "no GPU"
    cuda = f", CUDA {torch.version.cuda}" if names else ""
    nccl = f", NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}" if names else ""
    return (
        f"{datetime.date.today()}: {gpus}; torch {torch.__version__}{cuda}{nccl}, labkit {labkit.__version__}, "
        f"Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    )


class Table:
    """A pytest plugin: keeps what each test found."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, str, str, float]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep a row for a test that was called, skipped, or could not begin."""
        if report.when != "call" and report.passed:
            return
        found = "; ".join(str(value) for name, value in report.user_properties if name == "found")
        if report.skipped and isinstance(report.longrepr, tuple):
            found = found or report.longrepr[2].removeprefix("Skipped: ")
        name = report.nodeid.rpartition("::")[2].removeprefix("test_").replace("_", " ")
        self.rows.append((name, report.outcome, found, report.duration))

    def markdown(self) -> str:
        """Return the table."""
        lines = [hardware(), "", "| what | outcome | found | s |", "|---|---|---|---|"]
        lines += [f"| {name} | {outcome} | {found} | {seconds:.1f} |" for name, outcome, found, seconds in self.rows]
        return "\n".join(lines) + "\n"


def main() -> int:
    """Run the tests, print the table and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="file to write the table to")
    arguments, options = parser.parse_known_args()
    table = Table()
    code = pytest.main([str(Path(__file__).parent), "-q", *options], plugins=[table])
    print(table.markdown())
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(table.markdown())
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
