"""Whether a rank of this machine that does not answer has had the time to."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from labkit.protocol.events import Answered, Event, Exit, Stack
from labkit.system import host

# The problem: a rank that is suspended, or whose main thread holds the GIL in native code, never sends details (which
# collectives it has called, for example), and nobody should wait for it. One in a busy Python loop does send them, from
# a thread that must get the GIL from that loop a dozen times. On an idle machine that takes a tenth of a second, on a
# loaded one any number of seconds.
#
# What does not work: a fixed time, which is too short on a loaded machine; the time that the other ranks took, because
# they sleep in a collective and are woken at once, while the loop has used up its share. So the rank's own time counts:
# while it works, the processor time that it gets; while it does not work and could, the time that passes.
#
# Time in which this process itself gets no core does not count either: the answer may be waiting to be read. So between
# two looks at most half of the limit counts, and answers are read in between.
#
# What still fails: a rank that waits for a disk has all of the engine's `stacks_s`; where the system reports nothing
# about its processes (Linux does), the time that passes counts after all.

LOOK_EVERY_S = 0.05
"""Least time between two looks at silent ranks."""

MUTE_S = 1.0
"""Time of its own after which a silent rank counts as mute, in seconds."""

ANSWERS = frozenset({Stack, Answered})
"""What a rank sends that is asked where it is."""


class Look(NamedTuple):
    """The state of a process at one time."""

    now_s: float
    used_s: float
    """Processor time so far, in seconds."""
    at_work: bool
    """Whether one of its threads is running, is ready to run, or waits for a disk."""


def look_at(pid: int) -> Look:
    """Return the state of a process now."""
    return Look(time.monotonic(), *host.processor_use(pid))


class Silence:
    """The silence of one rank that has been asked where it is."""

    def __init__(self, look: Callable[[], Look]) -> None:
        self._look, self._last, self._own_s = look, look(), 0.0
        self.awaited = set(ANSWERS)

    def is_mute(self) -> bool:
        """Look once more; return whether the rank has had the time to answer."""
        before, now = self._last, self._look()
        passed_s, used_s = now.now_s - before.now_s, max(0.0, now.used_s - before.used_s)
        self._own_s += min(MUTE_S / 2, passed_s, used_s if now.at_work else passed_s)
        self._last = now
        return self._own_s >= MUTE_S


class Silences:
    """The silences of all ranks that have been asked."""

    def __init__(self, looks: Mapping[int, Callable[[], Look]]) -> None:
        self._of = {rank: Silence(look) for rank, look in looks.items()}
        self._mute: set[int] = set()
        self._look_due_s = 0.0

    def take(self, event: Event) -> None:
        """Record what a rank has sent."""
        if (silence := self._of.get(event.rank)) is not None:
            silence.awaited.discard(type(event))
            if not silence.awaited or isinstance(event, Exit):
                del self._of[event.rank]

    def mute(self) -> set[int]:
        """Return the ranks that have turned out to be mute."""
        if time.monotonic() >= self._look_due_s:
            self._look_due_s = time.monotonic() + LOOK_EVERY_S
            self._mute |= {rank for rank, silence in self._of.items() if silence.is_mute()}
        return self._mute
