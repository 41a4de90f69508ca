"""The reader's own packages and modules as bytes, for ranks on machines that do not have the notebook's files.

The problem. A rank imports by name, from a path that the notebook has sent; on another machine, without a shared
folder, nothing lies there. By-value pickling of a whole package is no way: its modules import each other, and find
their data beside them.

The solution. Each top-level module of the reader's that the notebook has imported travels as a zip archive, a package
with all that lies in its folder. A rank that does not find the module along its path unpacks the archive into a folder
of its own (`labkit.rank.carried_modules`). What still fails: packages of more than `MOST_BYTES`, of which only the
sources travel, or nothing; and modules that the notebook has not imported.
"""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from labkit.protocol import modules

MOST_BYTES = 16 << 20
"""Of the files of one package."""


def pack(own: Mapping[str, modules.Own]) -> dict[str, bytes]:
    """Return the reader's modules that this process has imported: by name, an archive of the file or the package."""
    return {
        name: archive
        for name, module in own.items()
        if "." not in name and (archive := _archive(name, Path(module.file)))
    }


def _archive(name: str, file: Path) -> bytes:
    """Return the archive of a module; empty if it is too large."""
    files = {file: f"{name}.py"}
    if file.name == "__init__.py":
        files = {path: f"{name}/{path.relative_to(file.parent).as_posix()}" for path in files_in(file.parent)}
        if _size(files) > MOST_BYTES:
            files = {path: to for path, to in files.items() if path.suffix == ".py"}
    if _size(files) > MOST_BYTES:
        return b""
    state = tuple((to, modules.stamp(str(path))) for path, to in files.items())
    if (kept := _zipped.get(file)) is None or kept[0] != state:
        kept = _zipped[file] = state, _zip(files)
    return kept[1]


_zipped: dict[Path, tuple[tuple[tuple[str, modules.Stamp | None], ...], bytes]] = {}
"""The newest archive of each module, by its file, and the state of its files then."""


def _zip(files: Mapping[Path, str]) -> bytes:
    zipped = io.BytesIO()
    with zipfile.ZipFile(zipped, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for path, to in files.items():
            archive.writestr(zipfile.ZipInfo(to), path.read_bytes(), zipfile.ZIP_DEFLATED, 1)
    return zipped.getvalue()


def files_in(package: Path, subpackages: bool = True) -> Iterator[Path]:
    """Yield the files in a package's folder, with or without those of packages inside it; none that are hidden."""
    for folder, folders, names in os.walk(package):
        inside = [each for each in folders if each[0] != "." and each != "__pycache__"]
        folders[:] = [each for each in inside if subpackages or not Path(folder, each, "__init__.py").exists()]
        yield from (Path(folder, name) for name in names if name[0] != ".")


def _size(files: Mapping[Path, str]) -> int:
    return sum(path.stat().st_size for path in files)
