"""Whether a rank that was killed had run out of memory: `seen` looks at the ranks' memory from outside."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from labkit.monitor.companion import Asked, Companion


def companion(asked: Asked) -> Companion:
    """Return what looks at the ranks' memory."""
    from labkit.plugins.memory.seen import Memory

    return Memory()
