"""The files of this repository, also where it came as an archive, without git."""

from __future__ import annotations

import fnmatch
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def beside_the_course(folder: Path) -> Path:
    """Have the course in a folder, as it lies beside the lessons, and return the folder."""
    (folder / "course").symlink_to(ROOT / "notebooks" / "course")
    return folder


def tracked(*folders: str) -> list[str]:
    """Return the files that git tracks, below these folders or all; from an archive, those it would not ignore."""
    if (ROOT / ".git").exists():
        listed = subprocess.run(["git", "ls-files", *folders], cwd=ROOT, capture_output=True, text=True, check=True)
        return listed.stdout.splitlines()
    ignored = (ROOT / ".gitignore").read_text().split()
    names = (path.relative_to(ROOT) for path in ROOT.rglob("*") if path.is_file())
    return sorted(
        str(name)
        for name in names
        if not any(_matches(name, pattern) for pattern in ignored)
        and (not folders or any(name.is_relative_to(folder) for folder in folders))
    )


def _matches(name: Path, pattern: str) -> bool:
    """Whether .gitignore names a file: a path from the top if it has a slash other than at its end, else any part."""
    pattern = pattern.rstrip("/")
    if "/" in pattern:
        return name.is_relative_to(pattern.lstrip("/"))
    return any(fnmatch.fnmatch(part, pattern) for part in name.parts)
