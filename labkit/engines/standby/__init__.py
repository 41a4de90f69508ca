"""Standby ranks: processes spawned ahead, with torch and what a first DDP step needs already imported.

Guarantees. Each is used for one run and is then gone, so that no run sees anything of an earlier one. A launch never
waits longer than it would without: it takes those that stand by as they are, also while they import, and spawns the
rest. None outlives the notebook, and none unused lives longer than `KEEP_S`. One that would miss what has changed in
the notebook since (the environment, the folder, the path) is not used.

This code assumes that `take` and `done` come in pairs, from any thread; that what a spawned process inherits is what
`_surroundings` compares; and that spawning is slow while the notebook computes, so that it is done only when no run is
going and the notebook is idle (`standby.idle`); what other programs do on the machine is no matter.

After a run as many are spawned as the run had ranks; in a notebook with a user the first when labkit has been
imported. Each takes some hundred MB. `off()`, or LABKIT_STANDBY=off in the
environment, does without: every launch then starts its ranks cold.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from typing import TYPE_CHECKING, Any

from labkit.engines.standby import idle

if TYPE_CHECKING:
    from labkit.engines.spawn import RankProcess

KEEP_S = 900.0
"""How long unused standby ranks are kept."""

LOOK_EVERY_S = 0.05
"""Time between two looks whether standby ranks have imported all."""

_lock = threading.RLock()
_changed = threading.Condition(_lock)
_enabled = os.environ.get("LABKIT_STANDBY", "on").lower() not in ("off", "0", "no", "false")
_ready: list[RankProcess] = []
_importing: set[RankProcess] = set()
"""Those that may be importing, for all that is known."""
_born_in: Any = None
"""The surroundings that the standby ranks inherited."""
_wanted = 0
_runs = 0
"""Runs that are going; nothing is spawned ahead meanwhile."""
_keeper: threading.Thread | None = None


def on(world_size: int | None = None) -> None:
    """Keep standby ranks after each run (the default); with `world_size`, have so many spawned for the first run too.

    A notebook with a user does that by itself; a script or a notebook without one only if it is asked here.
    """
    global _enabled
    if world_size is not None and (isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1):
        raise ValueError(f"world_size is a whole number of ranks, at least 1; got {world_size!r}")
    with _lock:
        _enabled = True
        if world_size is not None:
            _want(world_size)


def off() -> None:
    """Keep no standby ranks, and end those there are."""
    global _enabled, _wanted
    with _changed:
        _enabled, _wanted = False, 0
        _drop()
        _changed.notify_all()


def prewarm_first_launch() -> None:
    """Spawn as many as a launch takes by default, if none has come yet, and wait until they have imported all.

    The notebook's kernel does so in the background when it is idle after `import labkit`.
    """
    if not _enabled:
        return
    idle.wait()  # before torch is imported, too
    import torch

    count = torch.cuda.device_count() or 2
    with _lock:
        if not _enabled or _keeper is not None:
            return
        _want(count)
    with _changed:
        # A caller that comes first, a launch say, ends the wait: what is imported next is then needed at once.
        _changed.wait_for(lambda: _runs > 0 or not _enabled or (not _wanted and _look_who_is_warm()))


def pids() -> list[int]:
    """Return the process ids of the ranks that stand by."""
    with _lock:
        return [process.pid for process in _ready if process.is_alive]


def warm() -> bool:
    """Return whether as many stand by as are wanted, and all have imported what they may ahead of a run."""
    with _lock:
        _look_who_is_warm()
        return bool(_ready) and not _wanted and not _importing.intersection(_ready)


def take(count: int) -> list[RankProcess]:
    """Return processes for a run: those that stand by, then new ones. Balanced by `done`."""
    from labkit.engines.spawn import spawn

    global _ready, _runs, _wanted
    with _changed:
        _runs += 1
        _wanted = 0
        _changed.notify_all()  # a thread that waits for an idle moment need wait no longer
        if _ready and _born_in != _surroundings():
            _drop()  # a changed environment, folder or path: a process started now would see it, these do not
        alive = [process for process in _ready if process.is_alive]
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
    with _changed:
        _runs += 1
        _changed.notify_all()


def done(count: int) -> None:
    """Say that a run of `count` ranks is over; as many may now be spawned ahead. 0: as many as were wanted before."""
    global _runs
    with _changed:
        _runs -= 1
        if _enabled and (count or _wanted):
            _want(count or _wanted)


def _want(count: int) -> None:
    """Have so many stand by once the notebook is idle. With the lock held."""
    global _wanted, _keeper
    _wanted = count
    if _keeper is None:
        _keeper = threading.Thread(target=_keep, name="labkit-standby", daemon=True)
        _keeper.start()
    _changed.notify_all()


def _surroundings() -> Any:
    """What a spawned process inherits, and a standby rank would miss if it changed."""
    try:
        folder = os.getcwd()
    except FileNotFoundError:  # it has been deleted meanwhile
        folder = ""
    return dict(os.environ), folder, list(sys.path)


def _is_due() -> bool:
    return _wanted > 0 and _runs == 0


def _keep() -> None:
    while True:
        with _changed:
            _changed.wait_for(_is_due)
        if not idle.wait(_is_due, _sleep):
            continue
        _fill()
        with _changed:
            while not (_runs or _wanted or _look_who_is_warm()):
                _changed.wait(LOOK_EVERY_S)
            _changed.notify_all()
            if not _changed.wait_for(lambda: _runs > 0 or _wanted > 0, timeout=KEEP_S):
                _drop()


def _sleep(seconds: float) -> None:
    """Sleep, but no longer than standby ranks are due."""
    with _changed:
        _changed.wait_for(lambda: not _is_due(), seconds)


def _fill() -> None:
    from labkit.engines.spawn import spawn

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
            try:
                new = spawn(missing)
            except OSError:  # no more files or processes are allowed: the next launch says so, and how many ranks fit
                return
            _ready.extend(new)
            _importing.update(new)


def _look_who_is_warm() -> bool:
    """Take what standby ranks say; return whether none is importing any longer. With the lock held."""
    _importing.intersection_update(_ready)
    _importing.difference_update([one for one in _importing if one.is_alive and one.is_ready])
    return not any(process.is_alive for process in _importing)


def renew() -> None:
    """Replace standby ranks that would miss what has changed since: the environment, the folder, the path.

    A notebook's kernel calls it after each cell.
    """
    # A keeper that is spawning holds the lock: it will see the surroundings as they are, and the cell need not wait.
    if _lock.acquire(blocking=False):
        try:
            if _ready and not _runs and _enabled and _born_in != _surroundings():
                _want(max(_wanted, len(_ready)))
        finally:
            _lock.release()


@atexit.register
def _drop() -> None:
    with _lock:
        while _ready:
            _ready.pop().close()
