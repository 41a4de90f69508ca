"""The values of Hugging Face's Trainer as curves: a callback."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from labkit.rank.worker import Worker
from labkit.trackers.values import send


class TransformersCallback(TrainerCallback):
    """`Trainer(callbacks=[TransformersCallback(worker)])`: what the Trainer logs, every `logging_steps`, is a curve.

    The Trainer averages its loss over ranks before it logs it, so that all ranks have the same curve.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        """Send the numbers among the values. The summary at the end of training has no curve."""
        values = logs or {}
        if "train_runtime" not in values:
            send(self._worker, {name: value for name, value in values.items() if name != "epoch"}, state.global_step)
