"""The programs that a rank has started, by `subprocess`, say, and those that they have: they end with the rank.

Those with a session of their own (`start_new_session=True`, `setsid`) go on, as they were told to; so does what
multiprocessing has for tidying up after the rank.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from multiprocessing import resource_tracker

from labkit.system import host

END_S = 0.5
"""How long a program has to end when it is asked to."""

KILLED_S = 1.0
"""How long one that is killed may take to be gone: milliseconds, unless the system holds it."""

LOOK_EVERY_S = 0.005
"""Time between two looks whether they are gone."""


def adopt() -> None:
    """Have Linux make this process the parent of those whose own parents end: `sh -c "program &"` leaves such."""
    host.adopt_orphans()


def of(pid: int) -> list[int]:
    """Return the process ids of what a process has started, and what that has, of the process's own session."""
    found, left = [], [pid]
    with contextlib.suppress(OSError):
        session = host.session(pid)
        while left:
            for child in host.children(left.pop()):
                with contextlib.suppress(OSError):  # it has just ended
                    if host.session(child) == session:
                        found.append(child)
                        left.append(child)
    return found


def kill(pids: list[int], number: int = host.kill_signal) -> None:
    """Send a signal to those that are there."""
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, number)


def end() -> None:
    """End what this process has started: it is about to end itself. Asks first, and does not wait for long."""
    for number, patience_s in ((signal.SIGTERM, END_S), (host.kill_signal, KILLED_S)):
        kill(_left(), number)
        deadline = time.monotonic() + patience_s
        while _left() and time.monotonic() < deadline:
            time.sleep(LOOK_EVERY_S)
        if not _left():
            return


def _left() -> list[int]:
    """Return those that are there still; one that has ended is listed until somebody takes its exit code."""
    host.reap()
    tidier = getattr(resource_tracker._resource_tracker, "_pid", None)  # ends by itself, once it has tidied up
    return [pid for pid in of(os.getpid()) if pid != tidier]
