"""The runs that are going: what they hold, and their end with the notebook."""

from __future__ import annotations

import atexit
import weakref
from typing import TYPE_CHECKING

from labkit.engines import holders

if TYPE_CHECKING:
    from labkit.engines.base import Engine
    from labkit.monitor.run import Run

going: weakref.WeakSet[Run] = weakref.WeakSet()


def run_of(engine: Engine) -> Run | None:
    """Return the run that this engine carries, if it is not over."""
    return next((run for run in list(going) if run.engine is engine), None)


class _Runs:
    """All runs that are going, as a holder of processes."""

    def processes(self) -> list[holders.HeldProcess]:
        return [one for run in list(going) for one in self._of(run)]

    def end(self, pid: int) -> None:
        for run in list(going):
            if pid in run.pids:
                run.ask_to_stop()

    def _of(self, run: Run) -> list[holders.HeldProcess]:
        ranks = zip(run.pids, run.states, strict=False)  # no pids where the ranks are on another machine
        return [
            one
            for rank, (pid, state) in enumerate(ranks)
            for one in holders.held("run", run.name, rank, pid, state, self)
        ]


_runs = _Runs()
holders.add(_runs)


@atexit.register
def _end_with_the_notebook() -> None:
    """Leave no rank behind when the notebook's kernel, or a script, ends."""
    ending = [run for run in going if not run.engine.outlives_notebook]
    for run in ending:
        run.ask_to_stop()
        run.engine.kill()
    for run in ending:
        run.over.wait(5)  # until its processes have been waited for
