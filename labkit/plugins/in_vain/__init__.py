"""A stop does not wait in vain: for ranks that wait for each other, say.

on each rank                                        in the notebook
hooks      asked to stop ────────── attached ─────► beside   whether all that are left wait for what cannot come
waiting    what the main thread waits for just now
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from labkit.monitor.companion import Asked, Companion
    from labkit.protocol.job import RankHooks


def companion(asked: Asked) -> Companion:
    """Return what takes in what ranks wait for."""
    from labkit.plugins.in_vain.beside import InVain

    return InVain()


def rank_hooks() -> RankHooks:
    """Return what says what a rank waits for."""
    from labkit.plugins.in_vain.hooks import SaysWaits

    return SaysWaits()
