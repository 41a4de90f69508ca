"""Standby ranks: processes spawned ahead, with torch and what a first DDP step needs already imported.

Each is used for one run and is then gone, so that no run sees anything of an earlier one. After a run as many are
spawned as the run had ranks, once no run is going and the machine is idle. Each takes some hundred MB (`memory()`
says how much) until it is used or has waited for `KEEP_S`. `off()`, or LABKIT_STANDBY=off in the environment, does
without: every launch then starts its ranks cold.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import psutil

from labkit.engines.processes import RankProcess, spawn

KEEP_S = 900.0
"""How long unused standby ranks are kept."""

IDLE_SHARE = 0.3
"""The machine is idle when less than this share of its cores is busy …"""

IDLE_S = 0.4
"""… over so many seconds."""

_lock = threading.RLock()
_changed = threading.Condition(_lock)
_enabled = os.environ.get("LABKIT_STANDBY", "on").lower() not in ("off", "0", "no", "false")
_ready: list[RankProcess] = []
_born_in: Any = None
"""The surroundings that the standby ranks inherited."""
_wanted = 0
_runs = 0
"""Runs that are going; nothing is spawned ahead meanwhile."""
_keeper: threading.Thread | None = None


def on() -> None:
    """Keep standby ranks after each run (the default)."""
    global _enabled
    _enabled = True


def off() -> None:
    """Keep no standby ranks, and end those there are."""
    global _enabled, _wanted
    with _lock:
        _enabled, _wanted = False, 0
        _drop()


def pids() -> list[int]:
    """Give the process ids of the ranks that stand by."""
    with _lock:
        return [process.pid for process in _ready if process.process.is_alive()]


def memory() -> list[int]:
    """Give the memory in bytes that each standby rank adds (unique set size, where the system tells)."""
    found = []
    for pid in pids():
        info = psutil.Process(pid).memory_full_info()
        found.append(getattr(info, "uss", info.rss))
    return found


def take(count: int) -> list[RankProcess]:
    """Give processes for a run: those that stand by, then new ones. Balanced by `done`."""
    global _ready, _runs, _wanted
    with _lock:
        _runs += 1
        _wanted = 0
        if _ready and _born_in != _surroundings():
            _drop()  # a changed environment, folder or path: a process started now would see it, these do not
        alive = [process for process in _ready if process.process.is_alive()]
        for process in _ready:
            if process not in alive:
                process.close()
        taken, _ready = alive[:count], alive[count:]
    missing = count - len(taken)
    try:
        return taken + (spawn(missing) if missing else [])
    except BaseException:
        for process in taken:
            process.close()
        with _lock:
            _runs -= 1
        raise


def begun() -> None:
    """Say that a run works again that had been counted as over. Balanced by `done`."""
    global _runs
    with _lock:
        _runs += 1


def done(count: int) -> None:
    """Say that a run of `count` ranks is over; as many may now be spawned ahead. 0: as many as were wanted before."""
    global _runs, _wanted, _keeper
    with _changed:
        _runs -= 1
        if not _enabled:
            return
        _wanted = count or _wanted
        if _keeper is None:
            _keeper = threading.Thread(target=_keep, name="labkit-standby", daemon=True)
            _keeper.start()
        _changed.notify_all()


def _surroundings() -> Any:
    """What a spawned process inherits, and a standby rank would miss if it changed."""
    return dict(os.environ), os.getcwd(), list(sys.path)


def _keep() -> None:
    while True:
        with _changed:
            _changed.wait_for(lambda: _wanted > 0 and _runs == 0)
        if not _idle(lambda: _wanted > 0 and _runs == 0):
            continue
        _fill()
        with _changed:
            if not _changed.wait_for(lambda: _runs > 0 or _wanted > 0, timeout=KEEP_S):
                _drop()


def _idle(still: Callable[[], bool]) -> bool:
    """Wait until the machine has been idle for a moment; give up when `still` no longer holds."""
    psutil.cpu_percent()
    while still():
        time.sleep(IDLE_S)
        if psutil.cpu_percent() < 100 * IDLE_SHARE:
            return still()
    return False


def _fill() -> None:
    global _born_in, _wanted
    with _lock:  # a launch that comes now waits for these processes rather than start a second set
        if _runs or not _enabled or not _wanted:
            return
        while len(_ready) > _wanted:
            _ready.pop().close()
        if _ready and _born_in != _surroundings():
            _drop()
        _born_in = _surroundings()
        missing = _wanted - len(_ready)
        _wanted = 0
        if missing > 0:
            _ready.extend(spawn(missing))


@atexit.register
def _drop() -> None:
    with _lock:
        while _ready:
            _ready.pop().close()
