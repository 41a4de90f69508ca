"""What the system says of this machine: cores and memory."""

from __future__ import annotations

import contextlib
import os
import sys


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads(world_size: int) -> int:
    """Return with how many threads each of so many ranks computes here: its share of the cores.

    A smaller OMP_NUM_THREADS is shared instead, as administrators of shared machines set it.
    """
    allowed = os.environ.get("OMP_NUM_THREADS", "")
    return max(1, min(cores(), int(allowed) if allowed.isdecimal() else cores()) // world_size)


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
