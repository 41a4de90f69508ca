"""A run's curves as a run of MLflow."""

from __future__ import annotations

import os
import re
import sys
import time
from typing import Any

from labkit.trackers.base import LibraryTracker

NO_METRIC = re.compile(r"[^\w.\-/ ]")
"""What no version of MLflow takes in a name, and ":", which some do not."""

METRICS, PARAMETERS = 1000, 100
"""What MLflow takes in one request at most."""

STATUS = {"failed": "FAILED", "stopped": "KILLED"}


class MLflow(LibraryTracker):
    """A run of its own in an experiment of MLflow, beside any that the notebook has active.

    Args:
        experiment: its name; it is made if it is not there. By default what `MLFLOW_EXPERIMENT_NAME` says, or
            MLflow's "Default".
        uri: of the tracking server or store; by default MLflow's own, as `MLFLOW_TRACKING_URI` says. A database
            ("sqlite:///mlflow.db") needs SQLAlchemy and Alembic, which mlflow-skinny does not bring.
        by_rank: a curve of every rank in place of their mean.
    """

    library, package = "mlflow", "mlflow"

    def __init__(self, experiment: str | None = None, uri: str | None = None, by_rank: bool = False) -> None:
        super().__init__(by_rank)
        self.run_id = ""
        """MLflow's name of the run, once it has begun."""
        self._experiment, self._uri = experiment, uri
        self._metrics: list[Any] = []
        self._names: dict[str, str] = {}
        """What a curve is called there."""
        self._status = "FINISHED"

    def begin(self, name: str, parameters: dict[str, Any]) -> None:
        """Make the run, and note the arguments as its params."""
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self.run_id, self._metrics, self._names, self._status = "", [], {}, "FINISHED"
        self._client, self._metric = MlflowClient(self._uri), Metric
        title = self._experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "Default"
        found = self._client.get_experiment_by_name(title)
        number = found.experiment_id if found is not None else self._client.create_experiment(title)
        self.run_id = self._client.create_run(number, run_name=name).info.run_id
        params = [Param(key, str(value)) for key, value in parameters.items()]
        for start in range(0, len(params), PARAMETERS):
            self._client.log_batch(self.run_id, params=params[start : start + PARAMETERS])

    def log(self, step: int, values: dict[str, float], time_s: float | None = None) -> None:
        """Gather what `flush` sends."""
        at_ms = int((time.time() if time_s is None else time_s) * 1000)
        self._metrics += [self._metric(self._name(name), value, at_ms, step) for name, value in values.items()]

    def _name(self, name: str) -> str:
        """Return a name that MLflow takes; what it is called instead is said once."""
        if name not in self._names:
            parts = [part for part in NO_METRIC.sub("_", name).split("/") if part.strip(".")]
            free = wanted = "/".join(parts)[:240] or "_"
            number = 1
            while free in self._names.values():
                number += 1
                free = f"{wanted}_{number}"
            self._names[name] = free
            if free != name:
                print(f"MLflow takes no metric called {name!r}; there it is {free!r}", file=sys.stderr, flush=True)
        return self._names[name]

    def flush(self) -> None:
        """Send what was gathered."""
        metrics, self._metrics = self._metrics, []
        for start in range(0, len(metrics), METRICS):
            self._client.log_batch(self.run_id, metrics=metrics[start : start + METRICS])

    def end(self, status: str) -> None:
        """Note how the run ended."""
        self._status = STATUS.get(status, "FINISHED")

    def close(self) -> None:
        """End MLflow's run."""
        if self.run_id:
            self._client.set_terminated(self.run_id, self._status)
