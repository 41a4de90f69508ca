"""Whose a source file is: the reader's, or a library's."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Container
from pathlib import Path

LIBRARIES = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})
HERE = str(Path(__file__).parents[1]) + os.sep
"""labkit's own folder, to its end: a reader's labkit_utils.py beside it is the reader's."""


def is_readers(file: str, cells: Container[str]) -> bool:
    """Return whether a file is the reader's own: a cell of the notebook, or no library's."""
    return file in cells or not file.startswith((*LIBRARIES, HERE, "<"))
