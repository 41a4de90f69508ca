"""Files and folders that are one user's alone: what lies in a run's directory is run as code.

The folder and the open file are checked, the folders above are not. A user who can rename entries there can replace a
run's folder by another, but not by one that belongs to this user and that nobody else can write to.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def private(path: str | os.PathLike[str], flags: int) -> int:
    """Open a file that is this user's alone if it is made now: `open(…, opener=private)`."""
    return os.open(path, flags, 0o600)


def make_folders(path: Path) -> bool:
    """Make a folder and those above it, where they are missing, as this user's alone; return whether it was missing.

    `Path.mkdir(mode=…, parents=True)` gives the mode to the last of them only.
    """
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    for folder in reversed(missing):
        folder.mkdir(mode=0o700, exist_ok=True)
    return bool(missing)


def make_run_folder(path: Path) -> None:
    """Make the folder of a run. What it lies in (`labkit-runs`, say) is none of git's business if it is made now."""
    if make_folders(path.parent):
        with open(path.parent / ".gitignore", "w", opener=private) as file:
            file.write("# Made by labkit: runs have the sources and the values of their notebook.\n*\n")
    path.mkdir(mode=0o700)


def check_mine(path: Path, status: os.stat_result) -> None:
    """Raise ValueError if anybody but this user could have written what is there."""
    if not hasattr(os, "getuid"):
        return
    if status.st_uid != os.getuid():
        raise ValueError(
            f"{path} belongs to another user; what lies there would be run as code: not read. Its owner is user "
            f"{status.st_uid}, you are {os.getuid()}: if it is yours, its file system does not know this machine's "
            "users; give a folder=… elsewhere, in your home, say"
        )
    if status.st_mode & OTHERS_WRITE:
        raise ValueError(
            f"others than you can write into {path} (mode {stat.S_IMODE(status.st_mode):o}), and what lies there would "
            f"be run as code: not read. If nobody else has written there: chmod -R go-w {path}. Where the file system "
            "shows every file so, give a folder=… elsewhere, in your home, say"
        )
