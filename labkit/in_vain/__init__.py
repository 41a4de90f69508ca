"""A stop that does not wait for ranks which wait in vain: each other in a collective, say. See `run.cut_short`.

on each rank                                        in the notebook
hooks      asked to stop ────────── attached ─────► beside   whether all that are left wait for what cannot come
waiting    what the main thread waits for just now
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from labkit.monitor.companion import Asked, Companion


def companion(asked: Asked) -> Companion:
    """Return what takes in what ranks wait for."""
    from labkit.in_vain.beside import InVain

    return InVain()
