"""The runs that are going, and their end with the notebook."""

from __future__ import annotations

import atexit
import logging
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from labkit.engines.base import Engine
    from labkit.monitor.run import Run

logger = logging.getLogger("labkit")

going: weakref.WeakSet[Run] = weakref.WeakSet()


def run_of(engine: Engine) -> Run | None:
    """Return the run that this engine carries, if it is not over."""
    return next((run for run in list(going) if run.engine is engine), None)


@atexit.register
def _end_with_the_notebook() -> None:
    """Leave no rank behind when the notebook's kernel, or a script, ends."""
    ending = [run for run in going if not run.engine.outlives_notebook]
    for run in ending:
        for end in (run.ask_to_stop, run.engine.kill):
            try:
                end()
            except Exception as error:  # the others are to be ended, too
                logger.error("labkit could not end run %r", run.name, exc_info=error)
    for run in ending:
        run.over.wait(5)  # until its processes have been waited for
