"""The reader's own modules: which of those that a process has imported are files of his, and where they were found.

The problem. A rank imports by name, and may find another file than the notebook has: a relative entry of `sys.path`
means another folder after `os.chdir`, and a module that was loaded from a path is found in no folder.

The solution. The notebook sends its path with entries made absolute, as Python itself has understood them; and the
files of those modules that a search along it would not find, or find elsewhere.
"""

from __future__ import annotations

import ast
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import os
import re
import site
import struct
import sys
import sysconfig
import types
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

_FOLDERS = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
_FOLDERS |= {*site.getsitepackages(), site.getusersitepackages()} - {sys.prefix}
LIBRARIES = tuple(f"{folder}{os.sep}" for folder in _FOLDERS)
"""Where libraries are installed: this environment's, one that it extends, the system's own, this user's own."""

_COMPILED = struct.Struct("<4sIII")
"""The header of a compiled file: Python's version, flags, the source's time of change and size."""


class Stamp(NamedTuple):
    """Tells one state of a file from another."""

    changed_ns: int
    size_bytes: int
    inode: int


HERE = str(Path(__file__).parents[1]) + os.sep
"""labkit's own folder, to its end: a reader's labkit_utils.py beside it is the reader's."""


class Own(NamedTuple):
    """One of the reader's modules."""

    file: str
    spec: Any
    """Another after a reload."""
    stamp: Stamp | None
    """Of the file as it was imported."""


_seen: dict[str, types.ModuleType] = {}
_own: dict[str, Own] = {}
"""The reader's modules among those seen, by name."""


def is_readers(file: str, cells: Container[str] = ()) -> bool:
    """Return whether a file is the reader's own: a cell of the notebook, or no library's."""
    return file in cells or not file.startswith((*LIBRARIES, HERE, "<"))


def file_of(module: Any) -> str | None:
    """Return the absolute path that a module was loaded from; None if its spec names none."""
    origin = getattr(getattr(module, "__spec__", None), "origin", None)
    return os.path.abspath(origin) if isinstance(origin, str) else None


def is_library(name: str) -> bool:
    """Return whether a module of this name has been imported and is no file of the reader's."""
    module = sys.modules.get(name)
    file = file_of(module)
    return module is not None and name != "__main__" and not (file is not None and is_readers(file))


def of_reader() -> dict[str, Own]:
    """Return the reader's modules that this process has imported, by name."""
    for name, module in list(sys.modules.items()):
        if _seen.get(name) is not module:
            _seen[name] = module
            _own.pop(name, None)
            file = file_of(module)
            if file is not None and file.endswith(".py") and name != "__main__" and is_readers(file):
                _own[name] = Own(file, module.__spec__, _stamp_as_imported(module, file))
    for name in _own.keys() - sys.modules.keys():
        del _own[name], _seen[name]
    return dict(_own)


def edited(own: Mapping[str, Own]) -> list[str]:
    """Return the files of the reader's modules that have changed since they were imported, or reloaded; each once."""
    found = []
    for name, module in own.items():
        spec, now = sys.modules[name].__spec__, stamp(module.file)
        if spec is not module.spec:
            _own[name] = module._replace(spec=spec, stamp=now)
        elif now is not None and module.stamp is not None and now != module.stamp:
            found.append(module.file)
            _own[name] = module._replace(stamp=None)  # said
    return found


def stamp(file: str) -> Stamp | None:
    """Return the stamp of a file as it is now; None if it is gone."""
    try:
        status = os.stat(file)
    except OSError:
        return None
    return Stamp(status.st_mtime_ns, status.st_size, status.st_ino)


def _stamp_as_imported(module: types.ModuleType, file: str) -> Stamp | None:
    """Return the stamp that a file had when a module was imported from it.

    Of a file that has changed since this process began, the compiled file tells, in whole seconds. Of another it may be
    an older file's, where Python could not write it.
    """
    import psutil  # not above: ranks do without it until they import a module of the reader's

    now = stamp(file)
    began_s = int(psutil.Process().create_time())
    if now is None or now.changed_ns // 10**9 < began_s or sys.dont_write_bytecode:
        return now
    changed_s, size_bytes = now.changed_ns // 10**9, now.size_bytes & 0xFFFFFFFF
    compiled = _compiled_from(module)
    return now if compiled in (None, (changed_s, size_bytes)) else Stamp(compiled[0] * 10**9, compiled[1], 0)


def _compiled_from(module: types.ModuleType) -> tuple[int, int] | None:
    """Return when the file was changed from which Python has compiled a module, in s, and its size in bytes.

    None if Python has kept no compiled file.
    """
    try:
        with open(module.__spec__.cached, "rb") as file:  # type: ignore[union-attr, arg-type]
            _, flags, *found = _COMPILED.unpack(file.read(_COMPILED.size))
    except (AttributeError, OSError, TypeError, struct.error):
        return None
    return None if flags else (found[0], found[1])


class Search(NamedTuple):
    """Where a process finds its modules."""

    path: list[str]
    """`sys.path`, each entry absolute."""
    files: dict[str, str]
    """Files of modules that are not found along it, by name."""
    is_for_here: bool
    """Whether it is for processes of this machine, which has all of it."""
    archives: Mapping[str, bytes] | None = None
    """The reader's modules themselves, by name (see `module_archives`), for machines that may have none of it."""

    @classmethod
    def here(cls, is_for_here: bool, own: Mapping[str, Own], archives: Mapping[str, bytes] | None = None) -> Search:
        """Return that of this process, whose reader's modules are `own`."""
        path = [_absolute(entry) for entry in sys.path if isinstance(entry, str)]
        files = {name: module.file for name, module in own.items() if "." not in name}
        elsewhere = {name: file for name, file in files.items() if _found(name, path) != file}
        return cls(path, elsewhere, is_for_here, archives)

    def take_over(self) -> None:
        """Make it this process's own; on another machine, besides what there is."""
        sys.path[:] = self.path if self.is_for_here else [*sys.path, *(e for e in self.path if e not in sys.path)]
        sys.meta_path[:] = [each for each in sys.meta_path if not isinstance(each, _Finder)]
        if self.files:
            sys.meta_path.insert(0, _Finder(self.files))


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


class _Finder(importlib.abc.MetaPathFinder):
    """Finds modules where the notebook has found them."""

    def __init__(self, files: dict[str, str]) -> None:
        self._files = files

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find a module's file, if the notebook has sent where it is, and it is there."""
        file = self._files.get(fullname)
        if file is None or not os.path.exists(file):
            return None
        folders = [os.path.dirname(file)] if os.path.basename(file) == "__init__.py" else None
        return importlib.util.spec_from_file_location(fullname, file, submodule_search_locations=folders)


def imported(texts: Iterable[str]) -> tuple[str, ...]:
    """Return the modules that cells import, in order."""
    return tuple(dict.fromkeys(name for text in texts for name in _imported(text)))


@functools.lru_cache(maxsize=1000)
def _imported(cell: str) -> tuple[str, ...]:
    """Return the modules that a cell imports; none of one with IPython's own syntax that Python cannot read."""
    text = re.sub(r"^\s*[%!?].*$", "", cell, flags=re.MULTILINE)
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return ()
    found: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.append(node.module)
    return tuple(found)
