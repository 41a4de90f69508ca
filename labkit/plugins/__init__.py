"""What takes part in every run that is its own; any of these packages can be deleted, and the core goes on without it.

    reruns       a cell that is run again stops what it launched before
    memory       whether a rank that was killed had run out of memory
    stacks       where every rank stands (`run.stacks()`), and what a run that hangs is ended with
    stopping     a stop is obeyed at a step that all ranks reach, in a grace by the length of their steps
    in_vain      a stop does not wait for ranks that wait for what cannot come
    variables    what variables were when a rank failed
    as_script    what code of scripts needs in a rank: a DataLoader, `init_process_group`, an optimizer without compiler
    not_finite   the first NaN or Inf: said in every view, and marked in the chart
    many         more ranks than can be drawn one by one: a band, and who stands apart
    report       lines of text where nobody watches, and what stays of a run that is over
    ahead        what the first launch and chart need, got while the reader reads

`labkit.protocol.plugins` says by which functions they take part, and asks them.
"""

from __future__ import annotations

NAMES = (
    *("reruns", "memory", "stacks", "stopping", "in_vain", "variables", "as_script"),
    *("not_finite", "many", "report", "ahead"),
)
"""Those that there are, in the order in which they are asked: of several that could do the same, the first does."""
