"""Who holds processes on this machine: runs, standby ranks, sessions. One place to list and end them all."""

from __future__ import annotations

import contextlib
import sys
from typing import Any, NamedTuple

import psutil

from labkit.engines import standby
from labkit.monitor.active_runs import active_runs
from labkit.system import host


class HeldProcess(NamedTuple):
    """One process that labkit holds, as it was when it was listed."""

    kind: str
    """"run", "standby" or "session"."""
    name: str
    """Of the run or session; "" for a standby rank, which belongs to none yet."""
    rank: int | None
    """None for a standby rank, which learns its rank with its job."""
    pid: int
    since_s: float
    """When it was started, as `time.time()`."""
    state: str
    """What it does: "running", say, or "ready"."""
    holder: Any
    """The run or the session that holds it; for a standby rank, `labkit.standby`."""

    @property
    def memory_bytes(self) -> int:
        """What the process has for itself alone now (unique set size, where the system tells); 0 if it has ended."""
        return host.unique_bytes(self.pid)

    def end(self) -> None:
        """End it: a standby rank alone, but a run or a session as a whole. Does not wait until it is gone."""
        if self.kind == "run":
            self.holder.ask_to_stop()
        else:
            self.holder.end(self.pid)


def listed() -> list[HeldProcess]:
    """Return every process that labkit holds on this machine, those of sessions last."""
    found: list[HeldProcess] = []
    for run in list(active_runs):
        # No pids where the ranks are on another machine.
        for rank, (pid, state) in enumerate(zip(run.pids, run.states, strict=False)):
            found += held("run", run.name, rank, pid, state, run)
    for pid, state in standby.listed():
        found += held("standby", "", None, pid, state, standby)
    sessions = sys.modules.get("labkit.session.session")  # which imports this module; there are none before that
    return found + [one for session in (sessions.holders() if sessions else []) for one in session.processes()]


def processes() -> list[HeldProcess]:
    """Return every process that labkit holds on this machine: runs first, standby ranks last, each by rank."""
    order = {"run": 0, "session": 1, "standby": 2}
    # A run on reserved ranks has the session's processes, which are listed as the session's.
    found = list({one.pid: one for one in listed()}.values())
    # By rank, not by age: ranks of one holder start at once and in any order, and one may have been replaced.
    began_s: dict[int, float] = {}
    for one in found:
        began_s[id(one.holder)] = min(one.since_s, began_s.get(id(one.holder), one.since_s))

    def place(one: HeldProcess) -> tuple[float, ...]:
        return order.get(one.kind, 1), began_s[id(one.holder)], id(one.holder), one.rank or 0

    return sorted(found, key=place)


def held(kind: str, name: str, rank: int | None, pid: int, state: str, holder: Any) -> list[HeldProcess]:
    """Return one process in a list, or an empty list if it has ended."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        if process.status() != psutil.STATUS_ZOMBIE:
            return [HeldProcess(kind, name, rank, pid, process.create_time(), state, holder)]
    return []
