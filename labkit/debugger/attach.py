"""Beside a run whose ranks wait for a debugger of the reader's own (`debug="attach"`): says where each one waits.

The rank's side is `labkit.rank.breakpoints.attach`.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from labkit.failures.grouping import rank_list
from labkit.monitor.observers import RunObserver
from labkit.protocol import events
from labkit.protocol.job import Job
from labkit.rank.breakpoints.attach import ATTACHED, LEFT, LOOPBACK, WAITS, AttachHook, DebuggerState


@dataclass(frozen=True)
class DebuggersNotice(events.Change):
    """What there is to say of the debuggers."""

    text: str

    def change(self, state: Any, now_s: float) -> None:
        """Say it."""
        state.notice = self.text


class AttachObserver(RunObserver):
    """Beside one run."""

    title = "view of debuggers"

    def __init__(self, ranks: Collection[int]) -> None:
        """Take the ranks that are to wait for one."""
        self._ranks = ranks
        self._states: dict[int, DebuggerState] = {}

    def begin(self, job: Job) -> Job:
        """Return the job with what has its ranks wait."""
        return job.with_hook(AttachHook(self._ranks))

    def take(self, event: Any) -> None:
        """Note where a debugger is, and that a rank has ended."""
        match event:
            case DebuggerState():
                self._states[event.rank] = event
            case events.Result() | events.Failure() | events.Stopped() | events.Exit():
                if self._states.pop(event.rank, None) is None:
                    return
            case _:
                return
        # A rank that waits for somebody, or for something to be typed, does not hang.
        if any(each.state in (WAITS, ATTACHED) for each in self._states.values()):
            self.run.paused_by.add(self)
        else:
            self.run.paused_by.discard(self)
        self.run.note(DebuggersNotice(-1, self._notice()))

    def _notice(self) -> str:
        """Return which rank a debugger is at, which waits for one, and what to tell VS Code."""
        said = []
        for state, words in ((WAITS, "wait{} for a debugger"), (ATTACHED, "{} a debugger"), (LEFT, "{} no debugger")):
            if ranks := [each.rank for each in self._states.values() if each.state == state]:
                ending = ("s" if state == WAITS else "has") if len(ranks) == 1 else ("" if state == WAITS else "have")
                said.append(f"{rank_list(sorted(ranks))} {words.format(ending)}")
        free = [each for _, each in sorted(self._states.items()) if each.state != ATTACHED]
        if not free:
            return ", ".join(said)
        where = ", ".join(f"rank {each.rank} at {LOOPBACK}:{each.port}" for each in free)
        # What stands in VS Code's launch.json, in "configurations".
        lines = (json.dumps(_configuration(each)) for each in free)
        return f"{', '.join(said)}: attach to {where}\n" + ",\n".join(lines)


def _configuration(state: DebuggerState) -> dict[str, Any]:
    """Return how VS Code attaches to a rank."""
    connect = {"host": LOOPBACK, "port": state.port}
    return {"name": f"rank {state.rank}", "type": "debugpy", "request": "attach", "connect": connect}
