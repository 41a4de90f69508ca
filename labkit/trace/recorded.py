"""How a run comes to be traced: its job's function is wrapped in a recorder, in the notebook."""

from __future__ import annotations

from labkit.monitor.observers import RunObserver
from labkit.protocol.job import Job
from labkit.trace.recording import check_steps, traced


class TraceObserver(RunObserver):
    """Has so many steps of a run traced. Raises ValueError for no number."""

    title = "trace observer"

    def __init__(self, steps: int) -> None:
        check_steps(steps)
        self._steps = steps

    def begin(self, job: Job) -> Job:
        """Return the job with a function that does what it did, and is recorded."""
        return job._replace(function=traced(job.function, self._steps))
