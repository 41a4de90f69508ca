"""Which labkit this process runs, and which one is on the disk: `git pull` under a living kernel makes them two."""

from __future__ import annotations

import functools
import time
from pathlib import Path
from typing import NamedTuple

VERSION = "0.1.0"
"""`labkit.__version__`, and what pyproject.toml says."""

PACKAGE = Path(__file__).parent.parent


class Version(NamedTuple):
    """One state of the package."""

    number: str
    files_s: float
    """When its newest file was written, as `time.time()`."""

    def __str__(self) -> str:
        return f"labkit {self.number}, files of {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(self.files_s))}"


def on_disk() -> Version:
    """Return that of the files as they are now."""
    files = PACKAGE.rglob("*.py")
    return Version(VERSION, max(file.stat().st_mtime for file in files))


@functools.cache
def loaded() -> Version:
    """Return that of the files as they were when this was first called: before this process's first rank."""
    return on_disk()


def restart(kernels: Version, ranks: Version) -> str:
    """Return what to do where a kernel and its ranks run two states of the package; "" where it is one."""
    if kernels == ranks:
        return ""
    return f"labkit has changed since the kernel imported it ({kernels}; now {ranks}): restart the kernel"
