"""Files and folders made as one user's alone: what lies in a run's directory is run as code.

`labkit.rank.private_folder.check_mine` checks the folder and the open file, not the folders above. A user who can
rename entries there can replace a run's folder by another, but not by one that belongs to this user and that nobody
else can write to.
"""

from __future__ import annotations

import os
from pathlib import Path


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
        with open(path.parent / ".gitignore", "w", encoding="utf-8", opener=private) as file:
            file.write("# Made by labkit: runs have the sources and the values of their notebook.\n*\n")
    path.mkdir(mode=0o700)
