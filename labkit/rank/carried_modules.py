"""The reader's modules that came with a job (see `module_archives`), on a rank without the notebook's files."""

from __future__ import annotations

import atexit
import functools
import importlib
import importlib.machinery
import io
import os
import shutil
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

from labkit.rank.private_folder import locked_marker, new_folder


def have(archives: Mapping[str, bytes]) -> None:
    """Unpack the modules that this process does not find along `sys.path`, and put their folder at the path's end.

    It stays there on reserved ranks, which are not sent again what they have.
    """
    missing = {name: archive for name, archive in archives.items() if name not in sys.modules and not _is_found(name)}
    if missing:
        for archive in missing.values():
            with zipfile.ZipFile(io.BytesIO(archive)) as zipped:
                zipped.extractall(_folder())
        importlib.invalidate_caches()
    if _folder.cache_info().currsize and str(_folder()) not in sys.path:
        sys.path.append(str(_folder()))


def _is_found(name: str) -> bool:
    """Whether a module is found elsewhere than where a former archive of it may lie, which this one replaces."""
    spec = importlib.machinery.PathFinder.find_spec(name)
    mine = _folder.cache_info().currsize and spec is not None and str(spec.origin).startswith(f"{_folder()}{os.sep}")
    return spec is not None and not mine


@functools.cache
def _folder() -> Path:
    """Return the folder of this process, which goes with it."""
    folder = new_folder()
    locked_marker(folder)
    atexit.register(_remove, folder, os.getpid())
    return folder


def _remove(folder: Path, pid: int) -> None:
    if os.getpid() == pid:  # not a fork of the process that made it
        shutil.rmtree(folder, ignore_errors=True)
