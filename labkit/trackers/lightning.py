"""Lightning's values as curves: a logger, for Fabric and for the Trainer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch.loggers.logger import Logger

from labkit.rank.worker import Worker
from labkit.trackers.values import send


class LightningLogger(Logger):
    """`Trainer(logger=LightningLogger(worker))` or `Fabric(loggers=…)`: what every rank logs is its curve.

    The Trainer hands over what `self.log` was given every `log_every_n_steps`, 50 by default.
    """

    def __init__(self, worker: Worker) -> None:
        super().__init__()
        self._worker = worker

    @property
    def name(self) -> str:
        """What Lightning calls this logger."""
        return "labkit"

    @property
    def version(self) -> str:
        """None is kept: a launch is a run of its own."""
        return ""

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Send the numbers among the values. The epoch, which Lightning adds to each, has no curve."""
        send(self._worker, {name: value for name, value in metrics.items() if name != "epoch"}, step)

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        """Keep nothing: a run knows its arguments."""
