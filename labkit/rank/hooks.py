"""What takes part in every job of a rank, in the order in which it is called."""

from __future__ import annotations

from labkit.protocol.job import Job, RankHook
from labkit.rank.capture_locals import CaptureLocals
from labkit.rank.report_collectives import ReportCollectives
from labkit.rank.script_compat.reuse_process_group import ReuseProcessGroup


def hooks_of(job: Job) -> tuple[RankHook, ...]:
    """Return the hooks of a job: those of every job, then those that it brings along (the debugger's, say)."""
    return (ReportCollectives(), CaptureLocals(), ReuseProcessGroup(), *job.hooks)
