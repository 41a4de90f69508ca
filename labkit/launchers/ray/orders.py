"""What the notebook orders of the process that speaks with Ray, and that one's answer. It needs no torch."""

from __future__ import annotations

from typing import Any, NamedTuple


class Orders(NamedTuple):
    """All that the driver must know."""

    address: str
    world_size: int
    each: dict[str, float]
    """What each rank takes, by Ray's names."""
    placement: str
    max_restarts: int
    grow_s: float
    connect_s: float
    runtime_env: dict[str, Any]
    directory: str = ""
    """Of the run; this and the next are filled in when the job is submitted."""
    supervisor: str = ""
    """Below the package."""


class Answer(NamedTuple):
    """What the driver says first."""

    address: str
    """Of the cluster that it has joined; "" if it could not."""
    why_not: str = ""
