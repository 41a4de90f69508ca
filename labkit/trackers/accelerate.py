"""Accelerate's values as curves: a tracker."""

from __future__ import annotations

from typing import Any

from accelerate.tracking import GeneralTracker

from labkit.rank.worker import Worker
from labkit.trackers.values import send


class AccelerateTracker(GeneralTracker):
    """`Accelerator(log_with=AccelerateTracker(worker))`: what is given to `accelerator.log` is a curve, that of rank 0.

    Accelerate has its main process log, and no other.
    """

    name = "labkit"
    requires_logging_directory = False
    main_process_only = False

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        super().__init__(_blank=True)

    @property
    def tracker(self) -> Worker:
        """The rank's own worker, as `accelerator.get_tracker("labkit", unwrap=True)` returns it."""
        return self._worker

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Keep nothing: a run knows its arguments."""

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        """Send the numbers among the values."""
        send(self._worker, values, step)
