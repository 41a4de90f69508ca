"""The base classes of targets, which start ranks, and of engines, which carry those of one run."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from labkit.protocol import events
    from labkit.protocol.job import Job


class Target:
    """Where to launch if not by `mp.spawn`: `Slurm`, `Ray`, or ranks that a `Session` has reserved."""

    is_here = False
    """Whether the ranks are processes of this machine, which share its GPUs and cores."""
    world_size: int  # number of ranks
    device: str | None = None  # where ranks compute, as asked: "cpu", "cuda" or None
    reserved = 0
    """Number of ranks that share the GPUs, where that is more than `world_size`."""

    def engine(self, name: str, stall_s: float | None) -> Engine:
        """Return the engine for one run."""
        raise NotImplementedError

    def first(self, world_size: int) -> Target:
        """Return the first ranks, to launch on them only. Raises ValueError if there are not as many."""
        if world_size != self.world_size:
            raise ValueError(f"{self!r} has {self.world_size} ranks, but world_size={world_size!r}; omit world_size")
        return self


class Engine:
    """Carries the ranks of one run."""

    pids: list[int]
    outlives_notebook = False
    """Whether the ranks go on when the notebook ends."""
    stop_grace_s = 2.0
    """How long ranks that were asked to stop may take to return what they have, besides what their pace asks for."""
    failure_grace_s = 0.4
    """How long the other ranks may still report after the first has failed, in s; infinite where the engine ends them
    itself, or starts all again. Reports of victims make the diagnosis clearer."""
    stacks_s: float
    """How long ranks may take to report where they are, in s: longer over a network's file system."""
    sends_words = False
    """Whether `say` sends a rank a word at once; other ranks are reached through files."""
    folder: Path | None = None
    """Where ranks and notebook speak through files, if they do: `labkit.attach` finds the run there."""

    def start(self, job: Job) -> None:
        """Start the ranks."""
        raise NotImplementedError

    def poll(self, timeout_s: float) -> list[events.Event]:
        """Return events that have arrived; every rank's last is its `Exit`."""
        raise NotImplementedError

    def ask_to_stop(self) -> None:
        """Ask the ranks to end at their next common step; asked again, only their hooks receive it."""
        raise NotImplementedError

    def ask_for_stacks(self) -> list[int]:
        """Ask the ranks where they are, which comes as `events.Stack`, and for "details", which come as
        `events.Attached`; return the ranks asked.
        """
        raise NotImplementedError

    def say(self, rank: int, word: str) -> None:
        """Send one rank a word, for `Channel.listen`."""
        raise NotImplementedError

    def kill(self) -> None:
        """End the ranks now."""
        raise NotImplementedError

    def killed(self, rank: int) -> bool:
        """Return whether `kill` ended this rank."""
        raise NotImplementedError

    def close(self) -> None:
        """Let go of everything."""
        raise NotImplementedError


def kill_unmonitored(engine: Engine) -> None:
    """End ranks that nobody follows, as after an interrupt while they started; another must not leave them going."""
    while True:
        with contextlib.suppress(KeyboardInterrupt):
            engine.kill()
            engine.close()
            return
