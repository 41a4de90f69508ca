"""What takes part in every job of a rank, in the order in which it is called."""

from __future__ import annotations

from labkit.protocol.job import RankHook
from labkit.rank.capture_locals import CaptureLocals
from labkit.rank.report_collectives import ReportCollectives
from labkit.rank.script_compat.reuse_process_group import ReuseProcessGroup


def of_every_job() -> tuple[RankHook, ...]:
    """Return new hooks for one job. Those that it brings along (the debugger's, say) come after them."""
    return ReportCollectives(), CaptureLocals(), ReuseProcessGroup()
