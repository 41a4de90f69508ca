"""Programs that some tests need and that no package of Python brings.

A test whose program is missing is skipped, before any of its fixtures; the reason says how to have it run.
"""

from __future__ import annotations

import os
import shutil
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
    commands: tuple[str, ...]
    path: str | None
    install: str

    @property
    def why_skipped(self) -> str:
        """Why its tests cannot run here; "" if they can."""
        absent = [command for command in self.commands if shutil.which(command, path=self.path) is None]
        return f"no {self.name} here ({', '.join(absent)} not found): {self.install}" if absent else ""


NEEDED = {
    "browser": Program("Chromium", (CHROMIUM,), None, "apt install chromium"),
    "cluster": Program("SLURM", SLURM, SLURM_PATH, "apt install slurmctld slurmd slurm-client munge"),
}
"""By the marker of the tests."""


def why_skipped(item: pytest.Item) -> str:
    """Return which program a test needs that is missing; "" if none is."""
    reasons = (program.why_skipped for marker, program in NEEDED.items() if item.get_closest_marker(marker))
    return next(filter(None, reasons), "")
