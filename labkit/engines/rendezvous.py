"""Where the ranks of one machine meet: a store in a file that only this user can open, and a port that nobody has.

The problem: a `TCPStore` asks nobody who connects for a name. On a machine with several users each of them can connect
to one on 127.0.0.1, read the keys by which ranks find each other, and overwrite them.
What does not work: a secret prefix (newer stores list their keys); a listener that is closed once all ranks have come
(another user who was faster stays connected); a Python store that the notebook serves (ranks would wait whenever it
computes).
What is done: PyTorch's `FileStore`, in a folder of mode 0700. It looks every 10 ms for what it waits for, which would
make a launch on reserved ranks half as long again; `rank.file_store` looks sooner.
A notebook that is killed cannot remove the folder: the next one does, which sees that nobody holds its lock.
What still fails: gloo and NCCL listen on loopback themselves, as everywhere: see `.github/SECURITY.md`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import socket
import tempfile
import weakref
from pathlib import Path

from labkit.rank import ports
from labkit.system import host

PREFIX = "labkit-rendezvous-"
"""Of the folders' names, where temporary files are."""

LOCK = "lock"
"""A file in each, locked as long as its process lives."""


class LocalRendezvous:
    """A store's file and a port for the ranks of this machine, until `close` or the end of this process."""

    def __init__(self) -> None:
        remove_left_behind()
        self.port, reserved = ports.reserve("127.0.0.1")  # where a script may open a store
        self.folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        self.file = self.folder / "store"
        try:
            lock = _lock(self.folder)
        except OSError:  # no more open files, say
            shutil.rmtree(self.folder, ignore_errors=True)
            reserved.close()
            raise
        self.close = weakref.finalize(self, _close, os.getpid(), self.folder, reserved, lock)
        """Remove the folder, and let go of the port. Closing twice does nothing."""


def _lock(folder: Path) -> int:
    lock = os.open(folder / "new", os.O_CREAT | os.O_RDWR, 0o600)
    host.lock(lock)
    os.rename(folder / "new", folder / LOCK)  # before, nobody looks for it
    return lock


@functools.cache
def remove_left_behind() -> None:
    """Remove this user's folders whose processes were killed; once in a process."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # it is being made, or its process lives
            if folder.lstat().st_uid != os.getuid():
                continue
            lock = os.open(folder / LOCK, os.O_RDWR | os.O_NOFOLLOW)
            try:
                host.lock(lock)
                shutil.rmtree(folder)
            finally:
                os.close(lock)


def _close(pid: int, folder: Path, reserved: socket.socket, lock: int) -> None:
    if os.getpid() != pid:  # a fork of the process that made it, at its end
        return
    shutil.rmtree(folder, ignore_errors=True)
    reserved.close()
    os.close(lock)
