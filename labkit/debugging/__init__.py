"""`breakpoint()` and `input()` in a launched function: asked under the cell, with the rank in the prompt.

    the notebook's kernel                                 each rank
    ─────────────────────                                 ─────────
    answering   who can answer, if anybody
    prepare     puts `hooks` into the job ──────────────► hooks    in place of breakpoint, set_trace, input
    debugger    which rank is at which prompt ◄─ Asks ─── prompt   Python's own pdb, whose input and output
    panel       the same under the cell       ── LINE ──►          are this conversation

The core knows a run's `companion` and a job's `around`, and nothing of debugging. A rank at a prompt keeps the others
waiting as any slow rank does: in their next collective. Meanwhile `timeout_s` does not run (`Debugger.holds_the_time`),
and process groups wait a day instead of minutes (`hooks.hold_timeouts`).

Where nobody can answer, the hooks raise at once. On a cluster nobody can: ranks there are reached through files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from labkit.monitor.run import Run
    from labkit.protocol.job import Job

MENTIONS = (b"breakpoint", b"set_trace")
"""Names by which a function that was sent by value shows that it may stop."""


def prepare(run: Run, job: Job, live: bool | None, wait: bool) -> Job:
    """Return the job with what its ranks need to be debugged, and put a `Debugger` beside its run.

    `live` and `wait` are those of `labkit.launch`.
    """
    # Not above: every rank imports this package for its hooks, and has no use for the notebook's side.
    from labkit.debugging.answering import answerer
    from labkit.debugging.debugger import Debugger
    from labkit.debugging.hooks import Hooks

    if hasattr(run.engine, "work"):  # in this process, where Python's own debugger is at hand
        return job
    way, why_nobody = answerer(run.engine, live, wait)
    if way:
        run.companion = Debugger(run, job.cells, way)
    return job._replace(around=Hooks(why_nobody, any(name in job.function for name in MENTIONS)))
