"""Whether the system killed a process because memory had run out. Linux counts; elsewhere nothing is said."""

from __future__ import annotations

import contextlib
import functools
import os
from pathlib import Path
from typing import Literal

OutOfMemory = Literal["", "killed", "perhaps"]
"""Whether the system killed a process because memory had run out: no; yes; only the whole machine's count says so."""

# The problem: SIGKILL does not say who sent it. Linux counts the processes that it kills because memory has run out,
# but names none. What does not work: the system log, which users may not read; the machine's count alone (`oom_kill`
# in /proc/vmstat), which grows with every other user's process and every other container's. What is done: each cgroup
# counts the processes killed in it, and ranks are in that of the process which starts them. What still fails: another
# process of the same cgroup that is killed for memory while a rank is killed otherwise.


class OutOfMemoryKills:
    """Notices if a process that this one starts from now on is killed because memory has run out."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._cgroup = _cgroup_counter(root, os.getpid())
        self._host = root / "proc/vmstat"
        self._cgroup_before = None if self._cgroup is None else _oom_kills(self._cgroup)
        self._host_before = _oom_kills(self._host)

    def seen(self) -> OutOfMemory:
        """Return whether one has been killed: "killed" as this cgroup counts, "perhaps" where only the machine does."""
        if self._cgroup is not None and self._cgroup_before is not None:
            now = _oom_kills(self._cgroup)
            if now is not None:
                return "killed" if now > self._cgroup_before else ""
        now = _oom_kills(self._host)
        return "perhaps" if now is not None and self._host_before is not None and now > self._host_before else ""


@functools.lru_cache(maxsize=4)
def _cgroup_counter(root: Path, pid: int) -> Path | None:
    """Return the file in which the cgroup of this process, `pid`, counts what was killed in it; None if there is none.

    cgroup v2 has `memory.events`, and `memory.events.local` without the groups below; v1 has `memory.oom_control`.
    """
    with contextlib.suppress(OSError, ValueError):
        groups = [line.split(":", 2)[1:] for line in _lines(root / "proc/self/cgroup")]
        in_v1 = [path for controllers, path in groups if "memory" in controllers.split(",")]
        in_v2 = [path for controllers, path in groups if not controllers]
        for line in _lines(root / "proc/self/mountinfo"):
            mount, _, kind = line.partition(" - ")
            top, at = mount.split()[3:5]
            is_v1 = kind.startswith("cgroup ") and "memory" in kind.split()[-1].split(",")
            is_v2 = kind.startswith("cgroup2 ") and not in_v1
            files = ("memory.oom_control",) if is_v1 else ("memory.events.local", "memory.events") if is_v2 else ()
            for path in in_v1 if is_v1 else in_v2:
                folder = root / at.lstrip("/") / os.path.relpath(path, top)  # a container may see its own part alone
                for file in files:
                    if ".." not in folder.parts and _oom_kills(folder / file) is not None:
                        return folder / file
    return None


def _oom_kills(counters: Path) -> int | None:
    """Return the count in a file of the system's; None if it has none."""
    with contextlib.suppress(OSError, ValueError):
        for line in _lines(counters):
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return None


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8", errors="replace").splitlines()
