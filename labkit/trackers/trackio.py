"""A run's curves as a run of trackio."""

from __future__ import annotations

import contextvars
from typing import Any

from labkit.trackers.base import LibraryTracker


class Trackio(LibraryTracker):
    """A run of its own in a project of trackio: local, unless the options or `TRACKIO_SPACE_ID` say otherwise.

    `trackio.show("labkit")` draws it. What trackio cannot write it says itself.

    Args:
        project: its name.
        by_rank: a curve of every rank in place of their mean.
        options: what else `trackio.init` takes: name, space_id, group …
    """

    library, package = "trackio", "trackio"

    def __init__(self, project: str = "labkit", by_rank: bool = False, **options: Any) -> None:
        super().__init__(by_rank)
        self._options = {"project": project, **options}
        self._run: Any = None

    def begin(self, name: str, parameters: dict[str, Any]) -> None:
        """Make the run, with the arguments as its config."""
        import trackio

        config = parameters | self._options.get("config", {})
        options = {"name": name, "embed": False, **self._options, "config": config}
        # In a context of its own: trackio finishes the run that it finds, which would be the notebook's.
        self._run = contextvars.Context().run(trackio.init, **options)

    def log(self, step: int, values: dict[str, float]) -> None:
        """Write a row."""
        self._run.log(values, step=step)

    def close(self) -> None:
        """Finish the run."""
        if self._run is not None:
            self._run.finish()
