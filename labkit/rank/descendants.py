"""The programs that a rank has started, by `subprocess`, say, and those that they have: they end with the rank.

Those with a session of their own (`start_new_session=True`, `setsid`) go on, as they were told to; so does what
multiprocessing has for tidying up after the rank.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from multiprocessing import resource_tracker

PR_SET_CHILD_SUBREAPER = 36

KILL: int = getattr(signal, "SIGKILL", signal.SIGTERM)

END_S = 0.5
"""How long a program has to end when it is asked to."""

KILLED_S = 1.0
"""How long one that is killed may take to be gone: milliseconds, unless the system holds it."""

LOOK_EVERY_S = 0.005
"""Time between two looks whether they are gone."""


def adopt() -> None:
    """Have Linux make this process the parent of those whose own parents end: `sh -c "program &"` leaves such."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def of(pid: int) -> list[int]:
    """Return the process ids of what a process has started, and what that has, of the process's own session."""
    found, left = [], [pid]
    with contextlib.suppress(OSError):
        session = _session(pid)
        while left:
            for child in _children(left.pop()):
                with contextlib.suppress(OSError):  # it has just ended
                    if _session(child) == session:
                        found.append(child)
                        left.append(child)
    return found


def _session(pid: int) -> int:
    return os.getsid(pid) if hasattr(os, "getsid") else 0


def _children(pid: int) -> list[int]:
    if not _kernel_lists_children():
        return _children_by_psutil(pid)
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children") as pids:
                found += map(int, pids.read().split())
    return found


def _kernel_lists_children() -> bool:
    """Whether /proc has the children of each thread, which costs a look at these alone."""
    return os.path.exists(f"/proc/self/task/{threading.get_native_id()}/children")


def _children_by_psutil(pid: int) -> list[int]:
    import psutil  # not above: few ranks need it

    with contextlib.suppress(psutil.Error):
        return [child.pid for child in psutil.Process(pid).children()]
    return []


def kill(pids: list[int], number: int = KILL) -> None:
    """Send a signal to those that are there."""
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, number)


def end() -> None:
    """End what this process has started: it is about to end itself. Asks first, and does not wait for long."""
    for number, patience_s in ((signal.SIGTERM, END_S), (KILL, KILLED_S)):
        kill(_left(), number)
        deadline = time.monotonic() + patience_s
        while _left() and time.monotonic() < deadline:
            time.sleep(LOOK_EVERY_S)
        if not _left():
            return


def _left() -> list[int]:
    """Return those that are there still; whoever has ended is listed until somebody takes its exit code."""
    with contextlib.suppress(ChildProcessError):
        while os.name == "posix" and os.waitpid(-1, os.WNOHANG)[0]:
            pass
    tidier = getattr(resource_tracker._resource_tracker, "_pid", None)  # ends by itself, once it has tidied up
    return [pid for pid in of(os.getpid()) if pid != tidier]
