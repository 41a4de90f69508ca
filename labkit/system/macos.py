"""macOS, and other systems with POSIX calls that are not Linux. Nobody has run labkit there: see README."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from labkit.system.base import System


class MacOS(System):
    """macOS: POSIX calls, without /proc and without a signal at a parent's end."""

    # The wheels for macOS have LLVM's OpenMP, whose threads spin for 200 ms after each parallel loop; `labkit.system.
    # linux` says what that does to ranks that share cores.
    start_environment: ClassVar[Mapping[str, str]] = {**System.start_environment, "KMP_BLOCKTIME": "0"}
    # Libraries that choose a device by themselves choose the Mac's GPU, for which gloo has no collectives.
    rank_environment: ClassVar[Mapping[str, str]] = {"ACCELERATE_USE_CPU": "true"}
