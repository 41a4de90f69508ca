"""Where the ranks of one machine meet: a store in a file that only this user can open, and a port that nobody has.

The problem: a `TCPStore` asks nobody who connects for a name. On a machine with several users each of them can connect
to one on 127.0.0.1, read the keys by which ranks find each other, and overwrite them.
What does not work: a secret prefix (newer stores list their keys); a listener that is closed once all ranks have come
(another user who was faster stays connected); a Python store that the notebook serves (ranks would wait whenever it
computes).
What is done: PyTorch's `FileStore`, in a folder of mode 0700. It looks every 10 ms for what it waits for, which would
make a launch on reserved ranks half as long again; `rank.file_store` looks sooner.
What still fails: gloo and NCCL listen on loopback themselves, as everywhere: see `.github/SECURITY.md`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import weakref
from pathlib import Path

from labkit.rank import ports
from labkit.rank.private_folder import locked_marker, new_folder, remove_left_behind_once


class LocalRendezvous:
    """A store's file and a port for the ranks of this machine, until `close` or the end of this process."""

    def __init__(self) -> None:
        remove_left_behind_once()
        self.folder = new_folder()
        self.file = self.folder / "store"
        with contextlib.ExitStack() as if_it_fails:  # no more open files, say
            if_it_fails.callback(shutil.rmtree, self.folder, ignore_errors=True)
            marker = locked_marker(self.folder)
            if_it_fails.callback(os.close, marker)
            self.port, reserved = ports.reserve("127.0.0.1")  # where a script may open a store
            if_it_fails.pop_all()
        self.close = weakref.finalize(self, _close, os.getpid(), self.folder, marker, reserved)
        """Remove the folder, and let go of the port. Closing twice does nothing."""


def _close(pid: int, folder: Path, marker: int, reserved: socket.socket) -> None:
    if os.getpid() != pid:  # a fork of the process that made it, at its end
        return
    shutil.rmtree(folder, ignore_errors=True)
    reserved.close()
    os.close(marker)
