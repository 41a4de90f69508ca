"""What a launcher and an engine are: who starts ranks, and who carries those of one run."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from labkit.protocol import events
    from labkit.protocol.job import Job


class Target(Protocol):
    """Where to launch if not by `mp.spawn`: `Slurm`, `Ray`, `Torchrun`, or ranks that a `Session` has reserved."""

    is_here: bool
    """Whether the ranks are processes of this machine, which share its GPUs and cores."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""

    def engine(self, name: str, timeout_s: float | None) -> Engine:
        """Return what carries one run."""


class Engine(Protocol):
    """What a run needs of whatever carries its ranks."""

    pids: list[int]
    outlives_notebook: bool
    """Whether the ranks go on when the notebook ends."""
    stop_grace_s: float
    """How long ranks that were asked to stop may take to return what they have, besides what their pace asks for."""
    failure_grace_s: float
    """How long the other ranks may still report after the first has failed, in s; infinite where the engine ends them
    itself, or starts all again. Reports of victims make the diagnosis clearer."""
    stacks_s: float
    """How long ranks may take to say where they stand, in s: longer over a network's file system."""
    quiet_s: float
    """How long data may be on its way from rank to rank while none of them does anything."""

    @property
    def folder(self) -> Path | None:
        """Where ranks and notebook speak through files, if they do: `labkit.attach` finds the run there."""

    def start(self, job: Job) -> None:
        """Start the ranks."""

    def poll(self, timeout_s: float) -> list[events.Event]:
        """Return events that have arrived; every rank's last is its `Exit`."""

    def ask_to_stop(self) -> None:
        """Ask the ranks to end at their next common step; asked again, only their hooks hear of it."""

    def ask_for_stacks(self) -> list[int]:
        """Ask the ranks where they stand, which comes as `events.Stack`, and for "details", which come as
        `events.Attached`; return the ranks asked.
        """

    def kill(self) -> None:
        """End the ranks now."""

    def killed(self, rank: int) -> bool:
        """Whether `kill` ended this rank."""

    def close(self) -> None:
        """Let go of everything."""


def end_unminded(engine: Engine) -> None:
    """End ranks that nobody follows, as after an interrupt while they started; another must not leave them going."""
    while True:
        with contextlib.suppress(KeyboardInterrupt):
            engine.kill()
            engine.close()
            return
