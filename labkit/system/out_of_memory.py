"""Whether the system killed a process because memory had run out. Linux counts; elsewhere nothing is said."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Literal

OutOfMemory = Literal["", "killed", "perhaps"]
"""Whether the system killed a process because memory had run out: no; yes; only the whole machine's count says so."""

# The problem: SIGKILL does not say who sent it. Linux counts the processes that it kills because memory has run out,
# but names none. What does not work: the system log, which users may not read; the machine's count alone (`oom_kill`
# in /proc/vmstat), which grows with every other user's process and every other container's. What is done: each cgroup
# counts the processes killed in it, and ranks are in that of the process which starts them. What still fails: another
# process of the same cgroup that is killed for memory while a rank is killed otherwise. Of cgroups of version 1 nothing
# is read: there the machine's count says "perhaps".


class OutOfMemoryKills:
    """Notices if a process that this one starts from now on is killed because memory has run out."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._counters = _cgroup_counter(root), root / "proc/vmstat"
        self._before = [_oom_kills(counter) for counter in self._counters]

    def seen(self) -> OutOfMemory:
        """Return whether one has been killed: "killed" as this cgroup counts, "perhaps" where only the machine does."""
        answers: tuple[OutOfMemory, ...] = ("killed", "perhaps")
        for before, after, answer in zip(self._before, map(_oom_kills, self._counters), answers, strict=True):
            if before is not None and after is not None:
                return answer if after > before else ""
        return ""


def _cgroup_counter(root: Path) -> Path:
    """Return the file in which the cgroup of this process counts what was killed in it, if it is of version 2."""
    group = ""
    with contextlib.suppress(OSError):
        for line in _lines(root / "proc/self/cgroup"):
            if line.startswith("0::/"):
                group = line.removeprefix("0::/")
    return root / "sys/fs/cgroup" / group / "memory.events"


def _oom_kills(counters: Path) -> int | None:
    """Return the count in a file of the system's; None if it has none."""
    with contextlib.suppress(OSError, ValueError):
        for line in _lines(counters):
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return None


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8", errors="replace").splitlines()
