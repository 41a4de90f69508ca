"""The active runs, and their end with the notebook."""

from __future__ import annotations

import atexit
import logging
import weakref

from labkit.engines import spawn, standby
from labkit.engines.base import Engine
from labkit.monitor.record import RunRecord

logger = logging.getLogger("labkit")

active_runs: weakref.WeakSet[RunRecord] = weakref.WeakSet()


def run_of(engine: Engine) -> RunRecord | None:
    """Return the run that this engine carries, if it is not over."""
    return next((run for run in list(active_runs) if run.engine is engine), None)


def end_runs_and_ranks() -> None:
    """End all that a kernel which is asked to shut down would wait for: runs, ranks, and what multiprocessing needs."""
    end_all()
    standby.off()  # and none is being spawned
    spawn.end_all()


@atexit.register
def end_all() -> None:
    """Leave no rank behind when the notebook's kernel, or a script, ends."""
    ending = [run for run in active_runs if not run.engine.outlives_notebook]
    for run in ending:
        for end in (run.ask_to_stop, run.engine.kill):
            try:
                end()
            except Exception as error:  # the others are to be ended, too
                logger.error("labkit could not end run %r", run.name, exc_info=error)
    for run in ending:
        run.over.wait(5)  # until its processes have been waited for
