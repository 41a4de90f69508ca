"""Who holds processes on this machine: runs, standby ranks, sessions. One place to list and end them all."""

from __future__ import annotations

import contextlib
import sys
from typing import NamedTuple, Protocol

import psutil

from labkit.engines import standby
from labkit.monitor.active_runs import active_runs
from labkit.monitor.record import RunRecord
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
    holder: Holder

    @property
    def memory_bytes(self) -> int:
        """What the process has for itself alone now (unique set size, where the system tells); 0 if it has ended."""
        return host.unique_bytes(self.pid)

    def end(self) -> None:
        """End it: a standby rank alone, but a run or a session as a whole. Does not wait until it is gone."""
        self.holder.end(self.pid)


class Holder(Protocol):
    """Whatever holds processes."""

    def processes(self) -> list[HeldProcess]:
        """Return those that live; `held` makes each."""

    def end(self, pid: int) -> None:
        """Begin to end the one with this process id, and what cannot be without it. One that is gone is no error."""


class _Runs:
    """All runs that are going, as a holder of processes."""

    def processes(self) -> list[HeldProcess]:
        return [one for run in list(active_runs) for one in self._of(run)]

    def end(self, pid: int) -> None:
        for run in list(active_runs):
            if pid in run.pids:
                run.ask_to_stop()

    def _of(self, run: RunRecord) -> list[HeldProcess]:
        ranks = zip(run.pids, run.states, strict=False)  # no pids where the ranks are on another machine
        return [one for rank, (pid, state) in enumerate(ranks) for one in held("run", run.name, rank, pid, state, self)]


class _StandbyRanks:
    """The standby ranks, as a holder of processes."""

    def processes(self) -> list[HeldProcess]:
        return [one for pid, state in standby.listed() for one in held("standby", "", None, pid, state, self)]

    def end(self, pid: int) -> None:
        standby.end(pid)


_runs, _standby_ranks = _Runs(), _StandbyRanks()


def holders() -> list[Holder]:
    """Return everything that holds processes."""
    sessions = sys.modules.get("labkit.session.session")  # which imports this module; there are none before that
    return [_runs, _standby_ranks, *(sessions.holders() if sessions else [])]


def processes() -> list[HeldProcess]:
    """Return every process that labkit holds on this machine: runs first, standby ranks last, each by rank."""
    order = {"run": 0, "session": 1, "standby": 2}
    found = [process for holder in holders() for process in holder.processes()]
    # A run on reserved ranks has the session's processes.
    found = list({one.pid: one for one in sorted(found, key=lambda one: one.kind == "session")}.values())
    # By rank, not by age: ranks of one holder start at once and in any order, and one may have been replaced.
    began_s: dict[int, float] = {}
    for one in found:
        began_s[id(one.holder)] = min(one.since_s, began_s.get(id(one.holder), one.since_s))

    def place(one: HeldProcess) -> tuple[float, ...]:
        return order.get(one.kind, 1), began_s[id(one.holder)], id(one.holder), one.rank or 0

    return sorted(found, key=place)


def held(kind: str, name: str, rank: int | None, pid: int, state: str, holder: Holder) -> list[HeldProcess]:
    """Return one process in a list, or an empty list if it has ended."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        if process.status() != psutil.STATUS_ZOMBIE:
            return [HeldProcess(kind, name, rank, pid, process.create_time(), state, holder)]
    return []
