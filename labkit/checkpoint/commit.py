"""A checkpoint's folder: made aside, moved into place by one rename, removed when newer ones are there. On rank 0."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

from labkit.checkpoint.files import MANIFEST, UNFINISHED, checksum_of, folders, number, sync_folder


def make_aside(folder: Path) -> Path:
    """Make a folder for the next checkpoint, under a name that no reader looks for. Return its path."""
    remove_unfinished(folder)
    last = max((number(path) for path in folders(folder)), default=0)
    aside = folder / f".checkpoint-{last + 1:06d}.writing"
    aside.mkdir()
    return aside


def commit(aside: Path, manifest: dict[str, Any], keep: int) -> Path:
    """Write the manifest, move the folder into place, remove all but the last `keep`. Return where it is now.

    Raises OSError if a file is missing that a rank has written.
    """
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
    path = folder / aside.name.removeprefix(".").removesuffix(".writing")
    aside.rename(path)
    sync_folder(folder)
    for old in folders(folder)[:-keep]:
        try:
            old.rename(folder / f".{old.name}.removing")
        except OSError as error:
            warnings.warn(f"rank 0 could not remove the old checkpoint {old}: {error}", stacklevel=2)
    remove_unfinished(folder)
    return path


def remove_unfinished(folder: Path) -> None:
    """Remove what was not finished. Nobody writes meanwhile."""
    for path in folder.glob(".checkpoint-*"):
        if UNFINISHED.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)
