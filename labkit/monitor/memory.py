"""Whether a rank that was killed had run out of memory: it cannot say so itself."""

from __future__ import annotations

import time

from labkit.failures.facts import RankFacts
from labkit.monitor.observers import RunObserver
from labkit.protocol import events
from labkit.protocol.job import Job
from labkit.system import host
from labkit.system.out_of_memory import OutOfMemory, OutOfMemoryKills

LOOK_EVERY_S = 0.25
"""Time between two looks at the ranks' memory, the only way to know it of a rank that is killed."""


class MemoryWatch(RunObserver):
    """Looks at the memory of ranks on this machine, and whether the system ends processes when it runs out."""

    title = "memory observer"

    def __init__(self) -> None:
        self._look_due_s = 0.0
        self._starved: dict[int, OutOfMemory] = {}

    def begin(self, job: Job) -> Job:
        """Note how many processes have been killed before because memory had run out."""
        self._kills = OutOfMemoryKills()
        return job

    def look(self, silent_s: float) -> None:
        """See how much memory each rank at work has taken so far; what it says itself in the end is kept."""
        now_s = time.monotonic()
        if now_s >= self._look_due_s:
            self._look_due_s = now_s + LOOK_EVERY_S
            for rank, pid in zip(self.run.rank_states, self.run.pids, strict=False):
                if rank.is_at_work:
                    rank.peak_bytes = max(rank.peak_bytes, host.peak_bytes(pid))

    def take(self, event: events.Event) -> None:
        """Note who was killed while memory was wanting."""
        killed = isinstance(event, events.Exit) and event.code == -host.kill_signal
        if killed and self.run.pids and (how := self._kills.seen()):
            self._starved[event.rank] = how

    def add_facts(self, ranks: list[RankFacts]) -> None:
        """Say so of ranks that this run has not ended itself."""
        for rank in ranks:
            if not rank.ended_by_us:
                rank.out_of_memory = rank.out_of_memory or self._starved.get(rank.rank, "")
