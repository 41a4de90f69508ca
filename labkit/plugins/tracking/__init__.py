"""Trackers beside the notebook: the curves and arguments of a run in TensorBoard, MLflow, Weights & Biases or trackio.

    labkit.launch(train, lr=0.1, log_to="tensorboard")
    labkit.launch(train, lr=0.1, log_to=[labkit.tracking.TensorBoard("runs/a", by_rank=True), labkit.tracking.MLflow()])

The notebook's side writes, never a rank, so that it is the same on reserved ranks and on a cluster. A curve is the mean
over the ranks that log the value, at the steps that all of them have, as in the run's chart; with `by_rank=True` there
is one for every rank, "loss/rank 0" … Of a run that goes back to a checkpoint and begins again, each step is written
once.

Each tracker has a thread of its own, which takes what is new from the run's history. So a slow one lags behind, and
costs the run neither time nor memory; one that fails, or is not done `CLOSE_S` after the run's end, is named, and the
run is as without it. Where a tracker sends what it gets is its own affair: `WANDB_MODE=offline`, `MLFLOW_TRACKING_URI`.

Anything with `log(step, values)` and `close()` is a tracker (`Tracker`); `follow` gives one to a run that was attached.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from labkit import importing

if TYPE_CHECKING:
    from labkit.monitor.companion import Asked, Companion
    from labkit.plugins.tracking.base import Tracker
    from labkit.plugins.tracking.following import follow
    from labkit.plugins.tracking.mlflow import MLflow
    from labkit.plugins.tracking.tensorboard import TensorBoard
    from labkit.plugins.tracking.trackio import Trackio
    from labkit.plugins.tracking.wandb import Wandb

__all__ = ["MLflow", "TensorBoard", "Tracker", "Trackio", "Wandb", "follow"]

_HOMES = {
    "MLflow": "mlflow",
    "TensorBoard": "tensorboard",
    "Tracker": "base",
    "Trackio": "trackio",
    "Wandb": "wandb",
    "follow": "following",
}


def companion(asked: Asked) -> Companion | None:
    """Return what takes a run's curves to the trackers that `log_to` names. Raises as `labkit.launch` says."""
    if asked.log_to is None:
        return None
    from labkit.plugins.tracking.following import Followed

    return Followed(asked)


__getattr__ = importing(__name__, _HOMES, {})
