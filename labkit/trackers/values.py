"""What trainers log, made into what `worker.log` takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from labkit.protocol.events import RESERVED_NAMES
from labkit.rank.log_batcher import number
from labkit.rank.worker import Worker


def send(worker: Worker, values: Mapping[str, Any], step: int | None) -> None:
    """Log the numbers among the values. Texts, tables and pictures are left out; so is what labkit says itself.

    Raises `labkit.Stopped` once the run was asked to stop.
    """
    numbers = {}
    for name, value in values.items():
        if name in RESERVED_NAMES:
            continue
        try:
            numbers[name] = number(name, value, worker.rank)
        except TypeError:
            continue
    if numbers:
        worker.log(step, **numbers)
