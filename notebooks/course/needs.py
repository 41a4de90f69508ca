"""What not every machine has, said before a lesson begins."""

from __future__ import annotations

from labkit.system import require_posix


def needs_posix() -> None:
    """Raise OSError on Windows, with the cure: this lesson forks, kills, or starts launchers."""
    require_posix("this lesson")
