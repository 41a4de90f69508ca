"""Whether a rank of this machine that was asked where it stands, and is silent, would have answered if it could."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from labkit.protocol.events import Answered, Event, Exit, Stack

# The problem: a rank whose main thread keeps Python's lock, or that is suspended, never gives details (which
# collectives it has called, say), and nobody is to wait for it; one in a busy loop does, by a thread that must get the
# lock from that loop a dozen times. On an idle machine that takes a tenth of a second, on a loaded one any number of
# seconds.
#
# What does not work: a time of our clock, which is too short there; the time that the other ranks took, for they sleep
# in a collective and are woken at once, while the loop has used up its share. So the rank's own time is counted: while
# it is at work, what it has of a processor; while it is not, and could have one, the time that passes.
#
# Nor does what this process misses count: it may be what gets no core, with the answer waiting to be read. So of what
# passes between two of its looks half of the limit counts, at most, and it reads in between.
#
# What still fails: a rank that waits for a disk has all of the engine's `stacks_s`; where the system tells nothing of
# its processes (Linux does), it is our clock after all.

LOOK_EVERY_S = 0.05
"""Least time between two looks at those that are silent."""

MUTE_S = 1.0
"""Of its own time, after which a rank that is silent counts as mute."""

ANSWERS = frozenset({Stack, Answered})
"""What a rank says that is asked where it stands."""


class Look(NamedTuple):
    """What is seen of a process."""

    now_s: float
    used_s: float
    """Processor time so far."""
    at_work: bool
    """Whether one of its threads runs, would if a core were free, or waits for a disk."""


def _processor_use(pid: int) -> tuple[float, bool]:
    """Return the processor time that the threads of a process have used, in s, and whether any is at work.

    That is: whether it runs, would if a core were free, or waits for a disk. (0.0, False) where only Linux would tell.
    """
    if sys.platform != "linux":
        return 0.0, False
    used, at_work = 0, False
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/stat") as row:  # it may just have ended
                state, *fields = row.read().rpartition(")")[2].split()
                used += int(fields[10]) + int(fields[11])
                at_work = at_work or state in "RD"
    return used / os.sysconf("SC_CLK_TCK"), at_work


def look_at(pid: int) -> Look:
    """Return what is seen of a process now."""
    return Look(time.monotonic(), *_processor_use(pid))


class Silence:
    """Of a rank that is being asked where it stands, until it has answered."""

    def __init__(self, look: Callable[[], Look]) -> None:
        self._look, self._last, self._own_s = look, look(), 0.0
        self.awaited = set(ANSWERS)

    def is_mute(self) -> bool:
        """Look once more; return whether the rank has had the time for an answer."""
        before, now = self._last, self._look()
        passed_s, used_s = now.now_s - before.now_s, max(0.0, now.used_s - before.used_s)
        self._own_s += min(MUTE_S / 2, passed_s, used_s if now.at_work else passed_s)
        self._last = now
        return self._own_s >= MUTE_S


class Silences:
    """Of all ranks that are being asked."""

    def __init__(self, looks: Mapping[int, Callable[[], Look]]) -> None:
        self._of = {rank: Silence(look) for rank, look in looks.items()}
        self._mute: set[int] = set()
        self._look_due_s = 0.0

    def take(self, event: Event) -> None:
        """Note what has come from a rank."""
        if (silence := self._of.get(event.rank)) is not None:
            silence.awaited.discard(type(event))
            if not silence.awaited or isinstance(event, Exit):
                del self._of[event.rank]

    def mute(self) -> set[int]:
        """Return who has turned out to be mute."""
        if time.monotonic() >= self._look_due_s:
            self._look_due_s = time.monotonic() + LOOK_EVERY_S
            self._mute |= {rank for rank, silence in self._of.items() if silence.is_mute()}
        return self._mute
