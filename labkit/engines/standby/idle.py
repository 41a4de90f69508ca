"""Whether this notebook or script has work of its own just now, whatever other programs do on the machine."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection

import psutil

from labkit.system import host

IDLE_SHARE = 0.3
"""A notebook is idle when it wants less than this share of a core …"""

PAUSE_SHARE = 0.05
"""… over this share of the time that ranks take to start: the next cell, or the next line, would have come by then."""

START_S = 2.0
"""What ranks take to start, until some have been seen to."""

_started_in_s = START_S


def record_startup_s(seconds: float) -> None:
    """Say how long ranks have just taken to start on this machine: by it waits are measured."""
    global _started_in_s
    _started_in_s = seconds


def pause_s() -> float:
    """Return how long the notebook must have had nothing to do to count as idle, in s."""
    return PAUSE_SHARE * _started_in_s


def wait(
    still: Callable[[], bool] = lambda: True,
    apart_from: Callable[[], Collection[int]] = tuple,
    sleep: Callable[[float], object] = time.sleep,
) -> bool:
    """Wait until the notebook is idle; say so, or that `still` no longer holds.

    The work of this thread does not count, nor that of the child processes `apart_from`. `sleep` may return early when
    `still` no longer holds.
    """
    before, since = wanted_s(apart_from()), time.monotonic()
    while still():
        sleep(pause_s())
        now, then = wanted_s(apart_from()), time.monotonic()
        wanted = sum(max(0.0, seconds - before.get(who, 0.0)) for who, seconds in now.items())
        if wanted < IDLE_SHARE * (then - since):
            return still()
        before, since = now, then
    return False


def wanted_s(apart_from: Collection[int] = ()) -> dict[int, float]:
    """Return the processor time that each thread of this process and of its children has wanted so far, in s.

    Where the system tells, the time for which a thread waited for a core counts too: on a machine that others keep
    busy, work that hardly gets a core is work all the same. Elsewhere there is one entry a process.
    """
    here = os.getpid()
    pids = {here, *_descendants(here, apart_from)}
    found: dict[int, float] = {}
    for pid in pids:
        found.update(host.wanted_s(pid))
    found.pop(threading.get_native_id() if threading.current_thread() is not threading.main_thread() else 0, None)
    return found


def _descendants(pid: int, apart_from: Collection[int]) -> list[int]:
    try:
        children = psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []
    return [child.pid for child in children if child.pid not in apart_from]
