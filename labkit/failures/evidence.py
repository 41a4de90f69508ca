"""Reported errors that only say that another rank was not there: evidence about the others, never the cause."""

from __future__ import annotations

import re

from labkit.failures.facts import RankFacts
from labkit.protocol.modules import LIBRARIES
from labkit.system import host

LOST_PEER = re.compile(
    r"Connection (closed|reset) by peer|Broken pipe|Connection refused|Socket (closed|Timeout)|"
    r"remote process exited|NCCL.*(remote|abort|timed? ?out)|Timed out waiting.*(send|recv)|Application timeout|"
    r"successfully reached monitoredBarrier|failed to pass monitoredBarrier|Watchdog caught collective|"
    r"wait timeout after|Timeout waiting for key|Timed out after \d+ seconds waiting for (clients|key)",
    re.IGNORECASE,
)
"""How communication libraries report that another rank was not there: it has gone, or did not come in time."""

TORCH_ERROR = re.compile(r"(RuntimeError|torch\.distributed\.\w+)\b")
"""What torch raises. Python's own ConnectionResetError is about other connections: a DataLoader's, for example."""

LIMIT = re.compile(
    r"Timed out waiting (\d+)ms|wait timeout after (\d+)ms|Timeout\(ms\)=(\d+)|monitoredBarrier in (\d+) ms|"
    r"Timed out after (\d+) seconds",
    re.IGNORECASE,
)
"""The time limit that passed, in milliseconds; the last group is in seconds."""

WATCHDOG = re.compile(
    r"Watchdog caught collective operation timeout|ProcessGroupNCCL's watchdog|Heartbeat monitor timed out|"
    r"taking the entire process down|Could not acquire GIL within",
)
"""What NCCL's watchdog writes before it aborts a process that has waited for too long."""

WATCHDOG_CALL = re.compile(
    r"Watchdog caught collective operation timeout: \w+\(SeqNum=(?P<number>\d+), OpType=(?P<kind>\w+)"
)
WATCHDOG_GROUP = re.compile(r"PG GUID (?P<group>\w+)\((?P<description>[^)]*)\)[^\n]*Watchdog caught")
"""The call in which it waited, and its group, which only some of the lines name."""

ABORTED = host.aborted_codes


def is_only_evidence(rank: RankFacts) -> bool:
    """Return whether a rank's failure says no more than that another rank was not there."""
    return lost_peer(rank) or was_aborted_by_watchdog(rank)


def lost_peer(rank: RankFacts) -> bool:
    """Return whether a rank failed because another had gone, or did not come in time.

    The words alone prove nothing: the user's own web request can get a "Connection refused", too. So the error must
    be torch's, and not raised in another library. What still fails: a library called from the user's line whose C++
    raises a bare RuntimeError in these words.
    """
    if rank.failure is None or not TORCH_ERROR.match(rank.failure.summary):
        return False
    # The innermost frame is the user's own if it calls torch's C++: `work.wait()`.
    innermost = rank.failure.frames[0][0] if rank.failure.frames else ""
    if innermost.startswith(LIBRARIES) and "/torch/" not in innermost:
        return False
    return LOST_PEER.search(rank.failure.summary) is not None


def was_aborted_by_watchdog(rank: RankFacts) -> bool:
    """Return whether NCCL's watchdog aborted the process, because a collective did not finish in time."""
    return rank.failure is None and rank.exit_code in ABORTED and WATCHDOG.search(rank.output_end) is not None


def limit_s(rank: RankFacts) -> float | None:
    """Return the time limit in seconds that passed on a rank, or None if its failure names none."""
    said = rank.failure.summary if rank.failure else rank.output_end
    if (found := LIMIT.search(said)) is None:
        return None
    number = next(group for group in found.groups() if group)
    return float(number) if found[5] else int(number) / 1000


def watchdog_call(rank: RankFacts) -> tuple[str, str, int, str] | None:
    """Return the call in which NCCL's watchdog found a rank, or None.

    Returns:
        The name and description of the group, the number of the call in it, counted from 1, and its kind: "ALLREDUCE".
    """
    call = WATCHDOG_CALL.search(rank.output_end) if was_aborted_by_watchdog(rank) else None
    if call is None:
        return None
    group = WATCHDOG_GROUP.search(rank.output_end)
    name, description = (group["group"], group["description"]) if group else ("0", "default_pg")
    return name, description, int(call["number"]), call["kind"]
