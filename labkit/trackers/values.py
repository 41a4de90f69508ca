"""What trainers log, made into what `worker.log` takes."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from labkit.protocol.events import RESERVED_NAMES
from labkit.rank.log_batcher import number
from labkit.rank.worker import Worker

OTHER_NAME = "logged_{}"
"""What a value is called whose name `worker.log` keeps for itself."""


def send(worker: Worker, values: Mapping[str, Any], step: int | None) -> None:
    """Log the numbers among the values. Texts, tables and pictures are left out.

    Raises `labkit.Stopped` once the run was asked to stop.
    """
    numbers = {}
    for name, value in values.items():
        try:
            found = number(name, value, worker.rank)
        except TypeError:
            continue
        if name in RESERVED_NAMES:
            free = OTHER_NAME.format(name)
            warnings.warn(f"{name!r} is a column of run.history already; what was logged so is {free!r}", stacklevel=3)
            name = free
        numbers[name] = found
    if numbers:
        worker.log(step, **numbers)
