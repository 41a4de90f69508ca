"""What the notebook orders of the process that speaks with Ray. Light to import: that process needs no torch."""

from __future__ import annotations

from typing import Any, NamedTuple


class Orders(NamedTuple):
    """All that the driver must know."""

    directory: str
    address: str
    world_size: int
    each: dict[str, float]
    """What each rank takes, by Ray's names."""
    placement: str
    max_restarts: int
    grow_s: float
    connect_s: float
    runtime_env: dict[str, Any]
    supervisor: str = ""
    """Below the package; filled in when the job is submitted."""
