"""Trainers that log by themselves: one line each, and what they log on a rank becomes its curves.

    Accelerator(log_with=labkit.integrations.AccelerateTracker(worker))     then `accelerator.init_trackers("run")`
    Fabric(loggers=labkit.integrations.LightningLogger(worker), …)          and Lightning's `Trainer(logger=…)`
    transformers.Trainer(callbacks=[labkit.integrations.TransformersCallback(worker)], …)

They need nothing else of labkit: in a launched function `RANK`, `LOCAL_RANK`, `WORLD_SIZE`, `MASTER_ADDR` and
`MASTER_PORT` say what torchrun's would, and whoever calls `init_process_group` finds that it is done. When the run is
asked to stop, `labkit.Stopped` is raised where the trainer logs.

Each lies in a module of its own, which imports the library when it is first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from labkit import importing

if TYPE_CHECKING:
    from labkit.integrations.accelerate import AccelerateTracker
    from labkit.integrations.lightning import LightningLogger
    from labkit.integrations.transformers import TransformersCallback

__all__ = ["AccelerateTracker", "LightningLogger", "TransformersCallback"]

_HOMES = {
    "AccelerateTracker": "accelerate",
    "LightningLogger": "lightning",
    "TransformersCallback": "transformers",
}

__getattr__ = importing(__name__, _HOMES, {})
