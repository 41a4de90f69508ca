"""What a run knows of the cell that has launched it."""

from __future__ import annotations

from labkit.monitor.companion import Companion
from labkit.monitor.going import going
from labkit.protocol.job import Job
from labkit.ui.kernel import Execution


class Launched(Companion):
    """Beside a run that an execution of a cell has launched."""

    title = "observer of cells that run again"

    def __init__(self, by: Execution) -> None:
        self.by = by

    def begin(self, job: Job) -> Job:
        """Stop the runs that earlier executions of the cell have launched in the background."""
        launched = [(run, found.by) for run in list(going) if (found := run.companions.first(Launched))]
        earlier = [run for run, then in launched if then.cell == self.by.cell and then.number != self.by.number]
        for run in earlier:
            run.ask_to_stop()
        for run in earlier:
            run.wait_for_the_end()
        return job
