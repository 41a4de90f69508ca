"""Which trackers `log_to` means."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from labkit.trackers.base import Tracker
from labkit.trackers.mlflow import MLflow
from labkit.trackers.tensorboard import TensorBoard
from labkit.trackers.trackio import Trackio
from labkit.trackers.wandb import Wandb

NAMED: dict[str, Callable[[], Tracker]] = {
    "tensorboard": TensorBoard,
    "mlflow": MLflow,
    "wandb": Wandb,
    "trackio": Trackio,
}


def trackers(log_to: Any) -> list[Tracker]:
    """Return the trackers that `log_to` means: a name, a tracker, or several.

    Raises ValueError for an unknown name, TypeError for what is no tracker, ModuleNotFoundError for a library that is
    not installed.
    """
    several = log_to if isinstance(log_to, (list, tuple)) else [log_to]
    return [_tracker(each) for each in several]


def _tracker(named: Any) -> Tracker:
    if isinstance(named, str):
        if named not in NAMED:
            raise ValueError(f"log_to has no tracker {named!r}; it knows {', '.join(NAMED)}")
        return NAMED[named]()
    missing = [name for name in ("log", "close") if not callable(getattr(named, name, None))]
    if missing or isinstance(named, type):
        why = "is a class; call it" if isinstance(named, type) else f"has no {' and no '.join(missing)}"
        raise TypeError(
            f"log_to takes {', '.join(map(repr, NAMED))}, or objects with log(step, values) and close(); "
            f"{named!r:.60} {why}"
        )
    tracker: Tracker = named
    return tracker
