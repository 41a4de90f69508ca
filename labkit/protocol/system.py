"""What the system says of this machine: cores, memory, and processes ended for want of memory."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import psutil


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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


def resident_bytes() -> int:
    """Return the resident memory of this process now, in bytes; 0 where the system does not tell in this way."""
    with contextlib.suppress(OSError), open("/proc/self/statm") as pages:
        return int(pages.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def processor_use(pid: int) -> tuple[float, bool]:
    """Return the processor time that the threads of a process have used, in s, and whether any is at work.

    That is: whether it runs, would if a core were free, or waits for a disk. (0.0, False) where only Linux would tell.
    """
    if sys.platform != "linux":
        return 0.0, False
    used, at_work = 0, False
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/stat") as row:  # it may just have ended
                state, *fields = row.read().rpartition(")")[2].split()
                used += int(fields[10]) + int(fields[11])
                at_work = at_work or state in "RD"
    return used / os.sysconf("SC_CLK_TCK"), at_work


def out_of_memory_kills() -> int:
    """Return how many processes Linux has ended for want of memory since it started; 0 where it does not count them."""
    try:
        with open("/proc/vmstat") as counters:
            return next((int(line.split()[1]) for line in counters if line.startswith("oom_kill ")), 0)
    except OSError:
        return 0


def unique_bytes(process: psutil.Process) -> int:
    """Return what a process has for itself alone, in bytes; where the system does not tell, all that is resident.

    Raises psutil.Error if it has ended.
    """
    memory = process.memory_full_info()
    return int(getattr(memory, "uss", 0) or memory.rss)


def has_tpu() -> bool:
    """Return whether this machine has a TPU, by what is installed and what the environment says.

    PyTorch/XLA's own `PJRT_DEVICE` (https://docs.pytorch.org/xla), and what Cloud TPU machines set: `TPU_NAME` and its
    like.
    """
    is_named = os.environ.get("PJRT_DEVICE") == "TPU" or any(name.startswith("TPU_") for name in os.environ)
    return is_named and importlib.util.find_spec("torch_xla") is not None
