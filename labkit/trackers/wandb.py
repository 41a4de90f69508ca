"""A run's curves as a run of Weights & Biases."""

from __future__ import annotations

from typing import Any

from labkit.trackers.base import LibraryTracker


class Wandb(LibraryTracker):
    """A run of its own, beside any that the notebook has made with `wandb.init`.

    Whether it goes to a server is for the person to say, as always: `WANDB_MODE=offline` keeps it in a folder, which
    `wandb sync` sends later. Curves are drawn over "step", so that a step that comes late is not refused.

    Args:
        project: by default Weights & Biases' own choice.
        by_rank: a curve of every rank in place of their mean.
        options: what else `wandb.init` takes: entity, name, tags, dir, mode …
    """

    library, package = "wandb", "wandb"

    def __init__(self, project: str | None = None, by_rank: bool = False, **options: Any) -> None:
        super().__init__(by_rank)
        self._options = {"project": project, **options}
        self._run: Any = None
        self._exit_code = 0

    def begin(self, name: str, parameters: dict[str, Any]) -> None:
        """Make the run, with the arguments as its config."""
        import wandb

        quiet = wandb.Settings(console="off")  # what the notebook prints is not this run's
        config = parameters | self._options.get("config", {})
        options = {"name": name, "reinit": "create_new", "settings": quiet, **self._options, "config": config}
        self._run, self._exit_code = None, 0
        self._run = wandb.init(**options)
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: dict[str, float], time_s: float | None = None) -> None:
        """Write a row."""
        at = {} if time_s is None else {"_timestamp": time_s}
        self._run.log({**values, **at, "step": step})

    def end(self, status: str) -> None:
        """Note how the run ended."""
        self._exit_code = int(status == "failed")

    def close(self) -> None:
        """Finish the run."""
        if self._run is not None:
            self._run.finish(exit_code=self._exit_code)
