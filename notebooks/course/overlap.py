"""How much of its communication a rank overlaps with computing, read from a run's trace."""

from __future__ import annotations

from labkit.steps.intervals import intersect, length, union
from labkit.trace.trace import Trace


def share_computing(trace: Trace, kind: str, part: str = "") -> float:
    """Return during which share of the time that it sends a rank computes, all ranks and recorded steps together.

    Args:
        trace: of a run that was launched with `trace=…`.
        kind: how the calls begin that count, such as "all_reduce" or "send".
        part: "forward" or "backward": only calls of that part of a step; "": all.

    Returns:
        0: it computes nothing meanwhile; 1: it computes all the time; NaN: no such calls. Of a collective, waiting for
        the last rank does not count.
    """
    sent_s = computing_s = 0.0
    for time in trace.times:
        within = time.record.phases.get(part, []) if part else [(float("-inf"), float("inf"))]
        calls = zip(time.record.calls, time.halves, strict=True)
        sending = intersect(union(moves for call, (_, moves) in calls if call.kind.startswith(kind)), within)
        sent_s += length(sending)
        computing_s += length(intersect(sending, time.busy))
    return computing_s / sent_s if sent_s else float("nan")
