"""Trackers beside the notebook: the curves and arguments of a run in TensorBoard, MLflow, Weights & Biases or trackio.

    labkit.launch(train, lr=0.1, log_to="tensorboard")
    labkit.launch(train, lr=0.1, log_to=[labkit.trackers.TensorBoard("runs/a", by_rank=True), labkit.trackers.MLflow()])

The notebook's side writes, never a rank, so that it is the same on reserved ranks and on a cluster. A curve is the mean
over the ranks that log the value, at the steps that all of them have, as in the run's chart; with `by_rank=True` there
is one for every rank, "loss/rank 0" … Of a run that goes back to a checkpoint and begins again, each step is written
once.

Each tracker has a thread of its own, which takes what is new from the run's history. So a slow one lags behind, and
costs the run neither time nor memory; one that fails, or is not done `CLOSE_S` after the run's end, is named, and the
run is as without it. Where a tracker sends what it gets is its own affair: `WANDB_MODE=offline`, `MLFLOW_TRACKING_URI`.

Anything with `log(step, values)` and `close()` is a tracker (`Tracker`); `follow` gives one to a run that was attached.

The other way round, trainers that log by themselves need one line each, and what they log on a rank becomes its curves:

    Accelerator(log_with=labkit.trackers.AccelerateTracker(worker))     then `accelerator.init_trackers("run")`
    Fabric(loggers=labkit.trackers.LightningLogger(worker), …)          and Lightning's `Trainer(logger=…)`
    transformers.Trainer(callbacks=[labkit.trackers.TransformersCallback(worker)], …)

They need nothing else of labkit: in a launched function `RANK`, `LOCAL_RANK`, `WORLD_SIZE`, `MASTER_ADDR` and
`MASTER_PORT` say what torchrun's would, and whoever calls `init_process_group` finds that it is done. When the run is
asked to stop, `labkit.Stopped` is raised where the trainer logs.

Each tracker and trainer has a module of its own, which imports the library when it is first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from labkit.protocol.lazy import lazy_names

if TYPE_CHECKING:
    from labkit.trackers.accelerate import AccelerateTracker
    from labkit.trackers.base import Tracker
    from labkit.trackers.following import follow
    from labkit.trackers.lightning import LightningLogger
    from labkit.trackers.mlflow import MLflow
    from labkit.trackers.tensorboard import TensorBoard
    from labkit.trackers.trackio import Trackio
    from labkit.trackers.transformers import TransformersCallback
    from labkit.trackers.wandb import Wandb

_HOMES = {
    "AccelerateTracker": "accelerate",
    "LightningLogger": "lightning",
    "MLflow": "mlflow",
    "TensorBoard": "tensorboard",
    "Tracker": "base",
    "Trackio": "trackio",
    "TransformersCallback": "transformers",
    "Wandb": "wandb",
    "follow": "following",
}

__all__ = [
    "AccelerateTracker",
    "LightningLogger",
    "MLflow",
    "TensorBoard",
    "Tracker",
    "Trackio",
    "TransformersCallback",
    "Wandb",
    "follow",
]


__getattr__ = lazy_names(__name__, _HOMES, {})
