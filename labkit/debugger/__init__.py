"""`breakpoint()` and `input()` in a launched function: asked under the cell, with the rank in the prompt.

    the notebook's kernel                                 each rank
    ─────────────────────                                 ─────────
    answering   who can answer, if anybody
    beside      puts `hooks` into the job ──────────────► hooks    in place of breakpoint, set_trace, input
    debugger    which rank is at which prompt ◄─ Asks ─── prompt   Python's own pdb, whose input and output
    panel       the same under the cell       ── LINE ──►          are this conversation

The core knows a run's companions and a job's hooks, and nothing of debugging. A rank at a prompt keeps the others
waiting as any slow rank does: in their next collective. Meanwhile `timeout_s` does not run (`Debugger.holds_the_time`),
and process groups wait a day instead of minutes (`hooks.hold_timeouts`).

Where nobody can answer, the hooks raise at once. On a cluster nobody can: ranks there are reached through files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from labkit.debugger.beside import Beginning
    from labkit.monitor.companion import Asked


def companion(asked: Asked) -> Beginning:
    """Return what finds out, when the run begins, who can answer its ranks."""
    # Not above: every rank imports this package for its hooks, and has no use for the notebook's side.
    from labkit.debugger.beside import Beginning

    return Beginning(asked)
