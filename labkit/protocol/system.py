"""What the system says of this machine: cores, open files and memory."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from pathlib import Path
from typing import Literal

OutOfMemory = Literal["", "killed", "perhaps"]
"""Whether the system killed a process because memory had run out: no; yes; only the whole machine's count says so."""


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads(world_size: int) -> int:
    """Return with how many threads each of so many ranks computes here: its share of the cores.

    A smaller OMP_NUM_THREADS is shared instead, as administrators of shared machines set it.
    """
    allowed = os.environ.get("OMP_NUM_THREADS", "")
    return max(1, min(cores(), int(allowed) if allowed.isdecimal() else cores()) // world_size)


def raise_open_files_limit(needed: int) -> int:
    """Raise how many files this process may have open to `needed`, as far as it may; return how many that are now.

    No further than needed: code that calls `select` cannot handle a file's number above 1,023.
    """
    try:
        import resource
    except ModuleNotFoundError:  # Windows has no such limit
        return needed
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    if soft == unlimited or soft >= needed:
        return needed if soft == unlimited else soft
    allowed = needed if hard == unlimited else min(needed, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    except (OSError, ValueError):  # macOS has another limit, lower than the one it gives
        return soft
    return allowed


def peak_resident_bytes(pid: int) -> int:
    """Peak resident memory of a process in bytes; where the system does not keep it, what is resident now."""
    if sys.platform == "linux":
        # Not getrusage: its peak is inherited from the process that forked this one, the notebook's kernel.
        with contextlib.suppress(OSError), open(f"/proc/{pid}/status") as status:
            for row in status:
                if row.startswith("VmHWM:"):
                    return int(row.split()[1]) * 1024
        return 0
    import psutil

    with contextlib.suppress(psutil.Error):
        memory = psutil.Process(pid).memory_info()
        return getattr(memory, "peak_wset", memory.rss)
    return 0


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
        groups = [line.split(":", 2)[1:] for line in (root / "proc/self/cgroup").read_text().splitlines()]
        in_v1 = [path for controllers, path in groups if "memory" in controllers.split(",")]
        in_v2 = [path for controllers, path in groups if not controllers]
        for line in (root / "proc/self/mountinfo").read_text().splitlines():
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
        for line in counters.read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return None


def unique_bytes(pid: int) -> int:
    """Return what a process has for itself alone, in bytes; all that is resident where the system does not tell more.

    0 if it has ended.
    """
    import psutil

    with contextlib.suppress(psutil.Error):
        memory = psutil.Process(pid).memory_full_info()
        return int(getattr(memory, "uss", 0) or memory.rss)
    return 0
