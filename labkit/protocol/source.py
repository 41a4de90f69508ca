"""The text of source files, and of the notebook's cells."""

from __future__ import annotations

import linecache
from collections.abc import Mapping
from pathlib import Path

from labkit.protocol.job import Cell


def text_of(file: str, cells: Mapping[str, Cell]) -> str:
    """Return the text of a source file, or of the cell with this file name; "" if there is none."""
    return cells[file].text if file in cells else "".join(linecache.getlines(file))


def line_of(file: str, line: int, cells: Mapping[str, Cell]) -> str:
    """Return one line, counted from 1, stripped; "" if there is none."""
    lines = text_of(file, cells).splitlines()
    return lines[line - 1].strip() if 0 < line <= len(lines) else ""


def place_of(file: str, line: int, cells: Mapping[str, Cell]) -> str:
    """Return a line as text: "Cell In[3], line 14", "train.py, line 14"."""
    return f"{cells[file].title if file in cells else Path(file).name}, line {line}"
