"""A cell that is run again stops what its last execution launched in the background.

`beside` knows of each run which execution of which cell has launched it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from labkit.monitor.companion import Asked, Companion


def companion(asked: Asked) -> Companion | None:
    """Return what stops earlier runs of the cell that launches this one, if a cell does."""
    from labkit.plugins.reruns.beside import Launched
    from labkit.ui import kernel

    cell = kernel.this_execution()
    return None if cell is None or asked.function is None else Launched(cell)
