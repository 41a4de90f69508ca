"""macOS, and other systems with POSIX calls that are not Linux. Nobody has run labkit there: see README."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import ClassVar

from labkit.system.base import System
from labkit.system.posix import Posix


class MacOS(Posix):
    """macOS: POSIX calls, without /proc and without a signal at a parent's end."""

    name: ClassVar[str] = "macOS"
    # The wheels for macOS have LLVM's OpenMP, whose threads spin for 200 ms after each parallel loop; `labkit.system.
    # linux` says what that does to ranks that share cores.
    start_environment: ClassVar[Mapping[str, str]] = {**System.start_environment, "KMP_BLOCKTIME": "0"}
    # Libraries that choose a device by themselves choose the Mac's GPU, for which gloo has no collectives.
    rank_environment: ClassVar[Mapping[str, str]] = {"ACCELERATE_USE_CPU": "true"}

    def unique_bytes(self, pid: int) -> int:
        """Return what is resident of a process; 0 if it has ended.

        `memory_full_info` is refused for other processes, and could block indefinitely up to psutil 7.2.2.
        """
        import psutil

        with contextlib.suppress(psutil.Error):
            return int(psutil.Process(pid).memory_info().rss)
        return 0
