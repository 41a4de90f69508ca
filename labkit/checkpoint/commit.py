"""A checkpoint's folder: made aside, moved into place by one rename, removed when newer ones are there. On rank 0.

.checkpoint-000007.3f2a9c01.writing   what is being written; the token tells apart two runs that share a folder
.checkpoint-000007.3f2a9c01.lock      locked by its writer meanwhile, and says who that is
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import shutil
import socket
import threading
import time
import warnings
from pathlib import Path
from typing import IO, Any
from weakref import WeakSet

from labkit.checkpoint.files import MANIFEST, UNFINISHED, checksum_of, folders, number, sync_folder
from labkit.system import host

ABANDONED_S = 3600.0
"""What nobody has written to for so long is left behind, where locks do not tell."""

_of_this_process: WeakSet[Writing] = WeakSet()
"""What this process is writing, for where locks do not tell …"""

_guard = threading.Lock()
"""… and who looks through it, or adds to it."""


# The problem: what a killed run was writing is to be removed by the next one, but not what another run is writing just
# now. What does not work: a lock for as long as a run lives, for over a network the lock of a node that has crashed
# stays for minutes or for ever, and the run that SLURM starts again at once would be refused; to ask whether the
# process lives, which another node cannot. So each save holds a lock of its own, only while it writes, and what is
# locked is left alone. What still fails: a file system without locks, where another node's unfinished checkpoint is
# removed only after an hour; and two runs in one folder still take each other's checkpoints for their own, which is
# why they are warned.


class Writing:
    """A checkpoint that is being written."""

    def __init__(self, folder: Path) -> None:
        self._name = f".checkpoint-{_next_number(folder):06d}.{secrets.token_hex(4)}"
        self._lock_file = folder / f"{self._name}.lock"
        self._lock: IO[str] | None = open(self._lock_file, "x", encoding="utf-8")  # noqa: SIM115 - held while it writes
        self.path = folder / f"{self._name}.writing"
        with _guard:
            _of_this_process.add(self)
        try:
            _lock(self._lock)
            json.dump({"machine": socket.gethostname(), "pid": os.getpid()}, self._lock)
            self._lock.flush()
            self.path.mkdir()
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Let go of the lock, whether the checkpoint is in place or is to be removed. Twice does nothing."""
        lock, self._lock = self._lock, None
        if lock is not None:
            _unlock(lock)  # for a process that was forked meanwhile, too, a DataLoader's worker
            lock.close()
            self._lock_file.unlink(missing_ok=True)


def make_aside(folder: Path) -> Writing:
    """Make a folder for the next checkpoint, under a name that no reader looks for."""
    if others := remove_unfinished(folder):
        warnings.warn(
            f"another run ({', '.join(others)}) is writing checkpoints into {folder}, too: each takes the other's for "
            "its own. Give every run a folder of its own",
            stacklevel=2,
        )
    return Writing(folder)


def commit(writing: Writing, manifest: dict[str, Any], keep: int) -> Path:
    """Write the manifest, move the folder into place, remove all but the last `keep`. Return where it is now.

    Raises OSError if a file is missing that a rank has written.
    """
    aside = writing.path
    for name, facts in manifest["files"].items():
        if not (aside / name).is_file() or (aside / name).stat().st_size != facts["bytes"]:
            raise OSError(
                f"{aside / name}, {facts['bytes']:,} bytes, was written but is not there on rank 0; "
                "ranks on several nodes need a folder on a file system that they share"
            )
    with open(aside / MANIFEST, "w", encoding="utf-8") as file:
        json.dump({**manifest, "sha256": checksum_of(manifest)}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(aside)
    folder = aside.parent
    path = _move_into_place(aside)
    writing.release()
    sync_folder(folder)
    for old in folders(folder)[:-keep]:
        try:
            old.rename(folder / f".{old.name}.removing")
        except OSError as error:
            warnings.warn(f"rank 0 could not remove the old checkpoint {old}: {error}", stacklevel=2)
    remove_unfinished(folder)
    return path


def _move_into_place(aside: Path) -> Path:
    """Give a checkpoint its name, with the next number that no other run has taken meanwhile."""
    count = int(aside.name.split(".")[1].rpartition("-")[2])
    while True:
        path = aside.parent / f"checkpoint-{count:06d}"
        try:
            aside.rename(path)
            return path
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            count = _next_number(aside.parent)


def _next_number(folder: Path) -> int:
    return max((number(path) for path in folders(folder)), default=0) + 1


def remove_unfinished(folder: Path) -> list[str]:
    """Remove what was not finished, and nobody writes any more. Return who else is writing."""
    writers = []
    for path in folder.glob(".checkpoint-*"):
        lock = path.with_suffix(".lock")
        if UNFINISHED.fullmatch(path.name):
            if path.suffix == ".writing" and (writer := _writer(path, lock)):
                writers.append(writer)
                continue
            shutil.rmtree(path, ignore_errors=True)
            lock.unlink(missing_ok=True)
        elif path.suffix == ".lock" and not path.with_suffix(".writing").exists() and _age_s(path) > ABANDONED_S:
            path.unlink(missing_ok=True)
    return writers


def _writer(path: Path, lock: Path) -> str:
    """Return who is writing a checkpoint; "" if nobody is any more."""
    try:
        with open(lock, "r+", encoding="utf-8") as file:
            is_locked = _lock(file)
            if is_locked:
                return ""
            said = json.loads(file.read() or "{}")
    except FileNotFoundError:
        return ""
    except (OSError, ValueError):
        is_locked, said = None, {}
    pid, machine = said.get("pid", 0), said.get("machine", "?")
    if is_locked is None:  # no locks here
        if machine != socket.gethostname():
            is_written = min(map(_age_s, [path, *path.iterdir()])) < ABANDONED_S
        elif pid == os.getpid():
            with _guard:  # by its name, which has the token: a folder can be spelt in several ways
                is_written = any(writing.path.name == path.name for writing in _of_this_process)
        else:
            is_written = _lives(pid)
        if not is_written:
            return ""
    return f"process {pid} on {machine}"


def _lock(file: IO[str]) -> bool | None:
    """Lock a file; return whether that went, None where there are no locks."""
    try:
        host.lock(file.fileno())
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _unlock(file: IO[str]) -> None:
    with contextlib.suppress(OSError):
        host.unlock(file.fileno())


def _lives(pid: int) -> bool:
    import psutil  # not above: few ranks need it

    try:
        return bool(psutil.pid_exists(pid))
    except OverflowError:  # no process has such a number
        return False


def _age_s(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return float("inf")
