"""How long ranks that were asked to stop may take: by the length of a step, from what they log."""

from __future__ import annotations

from collections import deque

from labkit.protocol.events import Log

# A stop is obeyed in `worker.log`, at a step that the ranks agree on, so a rank that computes, or waits for a disk or
# for the network, must be given time. A fixed patience is no good, for a long step exceeds it; so what follows from the
# run's own pace is added to the engine's. Ranks that are stuck sit it out, unless it is proven that nothing can come
# (`labkit.failures.stop_deadlock`).

STEPS = 4
"""The grace in steps. A stop comes within one, is agreed on in the next, and obeyed in the third; one may be slower."""

RECENT = 100
"""Log calls of each rank by which its longest recent step is known."""


class Pace:
    """How long the steps of a run take, by what its ranks log."""

    def __init__(self, world_size: int) -> None:
        self._began_s = [0.0] * world_size
        self._last_s: list[float | None] = [None] * world_size
        self._to_first_s = [0.0] * world_size
        self._steps_s: list[deque[float]] = [deque(maxlen=RECENT) for _ in range(world_size)]

    def begin(self, rank: int, at_s: float) -> None:
        """Note that a rank begins, or begins again; in seconds since the launch."""
        self._began_s[rank], self._last_s[rank] = at_s, None

    def add(self, log: Log) -> None:
        """Note that a rank has logged."""
        steps_s, before_s = self._steps_s[log.rank], self._last_s[log.rank]
        if before_s is None:
            self._to_first_s[log.rank] = log.times_s[0] - self._began_s[log.rank]
        for at_s in log.times_s[-RECENT - 1 :]:  # of so many, the first, which follows none of them, is soon left out
            if before_s is not None:
                steps_s.append(at_s - before_s)
            before_s = at_s
        self._last_s[log.rank] = before_s

    @property
    def longest_step_s(self) -> float:
        """The longest recent time between two log calls of a rank, in s.

        The first call comes after whatever is made ready, and says something of the pace only while there is no second.
        """
        longest = [max(steps_s) for steps_s in self._steps_s if steps_s]
        return max(longest or self._to_first_s)

    @property
    def grace_s(self) -> float:
        """How long ranks that are asked to stop have besides the engine's time: four of their longest steps, in s."""
        return STEPS * self.longest_step_s
