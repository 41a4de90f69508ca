"""Programs that some tests need and that no package of Python brings.

A test whose program is missing is skipped, before any of its fixtures; the last lines of the run say how many were, and
how to have them run.
"""

from __future__ import annotations

import os
import re
import shutil
from collections import Counter
from typing import NamedTuple

import pytest

CHROMIUM = os.environ.get("LABKIT_CHROMIUM") or next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), "chromium"
)

SLURM = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "sinfo", "squeue", "scontrol", "scancel")
SLURM_PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
"""An ordinary user's has no daemons in it."""


class Program(NamedTuple):
    """What the tests with a marker need."""

    name: str
    of: str
    """Which tests these are."""
    commands: tuple[str, ...]
    path: str | None
    install: str

    @property
    def why_skipped(self) -> str:
        """Why its tests cannot run here; "" if they can."""
        absent = [command for command in self.commands if shutil.which(command, path=self.path) is None]
        return f"no {self.name} here ({', '.join(absent)} not found): {self.install}" if absent else ""


NEEDED = {
    "browser": Program("Chromium", "of the browser", (CHROMIUM,), None, "apt install chromium"),
    "cluster": Program("SLURM", "on SLURM", SLURM, SLURM_PATH, "apt install slurmctld slurmd slurm-client munge"),
}
"""By the marker of the tests."""


def why_skipped(item: pytest.Item) -> str:
    """Return which program a test needs that is missing; "" if none is."""
    reasons = (program.why_skipped for marker, program in NEEDED.items() if item.get_closest_marker(marker))
    return next(filter(None, reasons), "")


def not_run(reasons: list[str]) -> list[str]:
    """Return a sentence for each program that is missing, by the reasons for which tests were skipped."""
    skipped = Counter(match[1] for reason in reasons if (match := re.search(r"no (\w+) here \(", reason)))
    return [
        f"{count} {'test' if count == 1 else 'tests'} {program.of} did not run: {program.install}"
        for program in NEEDED.values()
        if (count := skipped[program.name])
    ]
