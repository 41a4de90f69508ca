"""Whose a source file is, the reader's or a library's, and what is in it."""

from __future__ import annotations

import linecache
import os
import site
import sysconfig
from collections.abc import Container, Mapping
from pathlib import Path

from labkit.protocol.job import Cell

_FOLDERS = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
LIBRARIES = tuple(f"{f}{os.sep}" for f in {*_FOLDERS, *site.getsitepackages(), site.getusersitepackages()})
"""Where libraries are installed: this environment's, one that it extends, the system's own, this user's own."""

HERE = str(Path(__file__).parents[1]) + os.sep
"""labkit's own folder, to its end: a reader's labkit_utils.py beside it is the reader's."""


def is_readers(file: str, cells: Container[str]) -> bool:
    """Return whether a file is the reader's own: a cell of the notebook, or no library's."""
    return file in cells or not file.startswith((*LIBRARIES, HERE, "<"))


def text_of(file: str, cells: Mapping[str, Cell]) -> str:
    """Return a source file, or the cell that has this file's name; "" if there is none."""
    return cells[file].text if file in cells else "".join(linecache.getlines(file))


def line_of(file: str, line: int, cells: Mapping[str, Cell]) -> str:
    """Return one line, counted from 1, without the space around it; "" if there is none."""
    lines = text_of(file, cells).splitlines()
    return lines[line - 1].strip() if 0 < line <= len(lines) else ""


def place_of(file: str, line: int, cells: Mapping[str, Cell]) -> str:
    """Return a line as its reader knows it: "Cell In[3], line 14", "train.py, line 14"."""
    return f"{cells[file].title if file in cells else Path(file).name}, line {line}"
