"""`breakpoint()` and `input()` in a launched function: asked under the cell, with the rank in the prompt.

The rank's side is `labkit.rank.breakpoints`.

    the notebook's kernel                                 each rank
    ─────────────────────                                 ─────────
    answering   who can answer, if anybody
    debugger    puts a hook into the job ───────────────► hook     in place of breakpoint, set_trace, input
                which rank is at which prompt ◄─ Asks ─── prompt   Python's own pdb, whose input and output
    panel       the same under the cell       ── LINE ──►          are this conversation
    attach      where a rank waits for another debugger ◄ attach   VS Code's, say, if it is this user's

A rank at a prompt keeps the others waiting as any slow rank does: in their next collective. Meanwhile `stall_s` does
not run (`RunRecord.paused_by`), and process groups wait a day instead of minutes (`hook.hold_timeouts`).

Where nobody can answer, the hook raises at once. On a cluster nobody can: ranks there are reached through files.
"""
