"""The user's own modules: which of those that a process has imported are the user's files, and where they were found.

The problem. A rank imports by name, and may find another file than the notebook has: a relative entry of `sys.path`
means another folder after `os.chdir`, and a module that was loaded from a path is found in no folder.

The solution. The notebook sends its path with entries made absolute, as Python itself has understood them, and the
folders of modules that it found in a working folder it has left. A function that uses a module which a rank would still
not find, or find elsewhere, is refused.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import linecache
import os
import site
import sys
import sysconfig
import time
import types
from collections.abc import Container, Iterator, Sequence
from pathlib import Path
from typing import Any

_FOLDERS = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
_FOLDERS |= {*site.getsitepackages(), site.getusersitepackages()}
LIBRARIES = tuple(f"{folder}{os.sep}" for folder in _FOLDERS)
"""Where libraries are installed: this environment's, one that it extends, the system's own, this user's own."""

HERE = str(Path(__file__).parents[1]) + os.sep
"""labkit's own folder, to its end: a user's labkit_utils.py beside it is the user's."""


def is_user_file(file: str, cells: Container[str] = ()) -> bool:
    """Return whether a file is the user's own: a cell of the notebook, or no library's."""
    return file in cells or not file.startswith((*LIBRARIES, HERE, "<"))


def file_of(module: Any) -> str | None:
    """Return the absolute path that a module was loaded from; None if its spec names none, but "built-in", say."""
    origin = getattr(getattr(module, "__spec__", None), "origin", None)
    return os.path.normpath(origin) if isinstance(origin, str) and os.path.isabs(origin) else None


# In the notebook


def search_path() -> list[str]:
    """Return where a rank looks for modules: `sys.path` with absolute entries, and folders that were left meanwhile."""
    path = [_absolute(entry) for entry in sys.path if isinstance(entry, str)]
    for name, file in _user_modules(with_submodules=False):
        if _found(name, path) is None:
            where = Path(file)
            where = where.parent if where.name == "__init__.py" else where
            if where.stem == name:
                path.append(str(where.parent))
    return path


def not_found_because(name: str, path: Sequence[str]) -> str:
    """Return why a rank would not find a top-level module of this process along a path; "" if it would."""
    module = sys.modules.get(name)
    if type(module) is not types.ModuleType or name in ("__main__", "__mp_main__"):
        return ""
    file = file_of(module)
    if module.__spec__ is None and not hasattr(module, "__file__"):
        return f"module {name!r} was made by hand, and a rank cannot import it"
    finder = type(module.__spec__ and module.__spec__.loader)
    if finder.__module__ == "__main__":
        return f"module {name!r} was imported by this notebook's own {finder.__name__}, and a rank cannot import it"
    if file is not None and is_user_file(file) and (found := _found(name, path)) != file:
        return f"module {name!r} was loaded from {file}, and a rank would " + (
            f"import {found}" if found else "not find it along sys.path"
        )
    return ""


def _absolute(entry: str) -> str:
    if os.path.isabs(entry):
        return entry
    # Python has understood a relative entry when it first searched there, and does not ask again.
    finder = sys.path_importer_cache.get(entry) if entry else None
    folder = getattr(finder, "path", None) or entry
    try:
        return os.path.abspath(folder)
    except OSError:  # the folder is gone
        return folder


def _found(name: str, path: Sequence[str]) -> str | None:
    spec = importlib.machinery.PathFinder.find_spec(name, path)
    return None if spec is None or spec.origin is None else os.path.abspath(spec.origin)


def _user_modules(with_submodules: bool = True) -> Iterator[tuple[str, str]]:
    """Yield the user's modules that this process has imported: name and file."""
    for name, module in list(sys.modules.items()):
        if name == "__main__" or ("." in name and not with_submodules):
            continue
        if (file := file_of(module)) is not None and file.endswith(".py") and is_user_file(file):
            yield name, file


# On reserved ranks

_changed_ns: dict[str, int] = {}
"""When the file of each of the user's modules had been changed last as the module was first seen here, by name."""

_looked_ns = time.time_ns()

CLOCK_NS = 20_000_000
"""How much earlier than `time.time()` a file system may say that a file was changed just now."""


def forget_edited() -> None:
    """Have the user's modules imported anew, all of them, if a file of theirs has been changed since it was imported.

    A module that is seen for the first time was imported since the last look, and its file may have changed since then.
    """
    global _looked_ns
    own, edited = dict(_user_modules()), []
    for name, file in own.items():
        try:
            now_ns = os.stat(file).st_mtime_ns
        except OSError:  # it is gone, and cannot be imported anew
            continue
        is_new = name not in _changed_ns
        if _changed_ns.setdefault(name, now_ns) != now_ns or (is_new and now_ns > _looked_ns - CLOCK_NS):
            edited.append(file)
    _looked_ns = time.time_ns()
    if not edited:
        return
    for file in edited:
        # Python compares a compiled file's time in seconds.
        with contextlib.suppress(OSError, NotImplementedError):
            os.remove(importlib.util.cache_from_source(file))
    importlib.invalidate_caches()
    linecache.checkcache()
    _changed_ns.clear()
    for name in own:
        sys.modules.pop(name, None)
