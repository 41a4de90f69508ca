"""What the reader's variables were when a rank failed: in the error, in the run's summary, in `error.frames`.

on each rank                                              in the notebook
hooks        the frames of an exception ── attached ────► frames    the reader's own, in words and as HTML
describing   a value in a few words
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from labkit.monitor.companion import Asked, Companion


def companion(asked: Asked) -> Companion:
    """Return what takes in what ranks say of their variables."""
    from labkit.variables.frames import Variables

    return Variables()
