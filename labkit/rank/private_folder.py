"""Temporary folders that are one user's alone, and that do not stay when the process that made them is killed.

Such a process leaves its folder behind, which the next process that makes one removes. Whether a process is gone is
told by a lock, which the system releases with it: containers that share a folder for temporary files do not share
process ids.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import stat
import tempfile
import time
from pathlib import Path

from labkit.system import host

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
OTHERS_REACH = stat.S_IRWXG | stat.S_IRWXO

PREFIX = "labkit-rendezvous-"
"""Of the folders' names, where temporary files are."""

MARKER = "in-use"
"""A file that is locked for as long as the process lives that made the folder."""

MAKING_S = 60.0
"""How long a folder may take to get its marker."""


def new_folder() -> Path:
    """Make a folder of this process."""
    return Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=tempfile.gettempdir()))


def locked_marker(folder: Path) -> int:
    """Make the marker in a new folder, locked from the moment on at which it has its name."""
    new = folder / f"{MARKER}.new"
    marker = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    host.lock(marker, wait=True)
    new.rename(folder / MARKER)
    return marker


@functools.cache
def remove_left_behind_once() -> None:
    """Remove, once in this process, what others have left where this one's folders lie."""
    remove_left_behind(Path(tempfile.gettempdir()))  # which may hold many thousand files


def remove_left_behind(where: Path) -> None:
    """Remove the folders of this user whose processes are gone."""
    for folder in where.glob(f"{PREFIX}*"):
        if not is_in_use(folder):
            shutil.rmtree(folder, ignore_errors=True)


def is_in_use(folder: Path) -> bool:
    """Return whether the process that made a folder lives."""
    try:
        check_rendezvous(folder)
        marker = os.open(folder / MARKER, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:  # it is being made, or removed
        with contextlib.suppress(FileNotFoundError):
            return time.time() - folder.stat().st_mtime < MAKING_S
        return True
    except (OSError, ValueError):  # it is another user's
        return True
    try:
        host.lock(marker, shared=True)
    except OSError:
        return True
    finally:
        os.close(marker)
    return False


def check_mine(path: Path, status: os.stat_result, others: int = OTHERS_WRITE) -> None:
    """Raise ValueError if a user other than this one could have written what is there.

    Args:
        path: of the file or folder.
        status: its own, of the open file for example; of a link, the link's.
        others: permission bits that the group and others may not have.
    """
    if status.st_uid != os.getuid():
        raise ValueError(
            f"{path} belongs to another user; what lies there would be run as code: not read. Its owner is user "
            f"{status.st_uid}, you are {os.getuid()}: if it is yours, its file system does not know this machine's "
            "users; give a folder=… elsewhere, in your home, say"
        )
    if status.st_mode & others:
        can, remedy = ("write into", "go-w") if others == OTHERS_WRITE else ("reach", "go-rwx")
        raise ValueError(
            f"others than you can {can} {path} (mode {stat.S_IMODE(status.st_mode):o}), and what lies there would "
            f"be run as code: not read. If nobody else has written there: chmod -R {remedy} {path}. Where the file "
            "system shows every file so, give a folder=… elsewhere, in your home, say"
        )


def check_rendezvous(folder: Path) -> None:
    """Raise ValueError if another user can reach what is in a folder, or has made it; OSError if there is none."""
    check_mine(folder, os.lstat(folder), OTHERS_REACH)  # a link is refused by its mode
