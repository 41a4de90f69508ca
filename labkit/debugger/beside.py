"""How a run comes by its debugger: whoever can answer its ranks is known when it begins."""

from __future__ import annotations

from labkit.debugger import answering
from labkit.debugger.debugger import Debugger
from labkit.debugger.hooks import Hooks
from labkit.monitor.companion import Asked, Companion
from labkit.protocol.job import Job

MENTIONS = (b"breakpoint", b"set_trace")
"""Names by which a function that was sent by value shows that it may stop."""


class Beginning(Companion):
    """Puts a `Debugger` beside the run, if anybody can answer, and the hooks into its job."""

    title = "debugger's beginning"

    def __init__(self, asked: Asked) -> None:
        self._asked = asked

    def begin(self, job: Job) -> Job:
        """Return the job with what its ranks need to be debugged."""
        run = self.run
        if run.engine.runs_in_this_process:  # in this process, where Python's own debugger is at hand
            return job
        way, why_nobody = answering.answerer(run.engine, self._asked.live, self._asked.wait)
        if way:
            run.companions.append(Debugger(run, job.cells, way))
        return job.with_hooks(Hooks(why_nobody, any(name in job.function.head for name in MENTIONS)))
