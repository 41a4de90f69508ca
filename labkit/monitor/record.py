"""What is known of one run, for those who follow, observe and show it. `labkit.Run` adds how to wait for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit.engines.base import Engine
from labkit.failures.facts import Diagnosis
from labkit.failures.frames import frames_of
from labkit.monitor.history import History, Progress
from labkit.monitor.state import RankState, RunState
from labkit.protocol import events
from labkit.protocol.job import Cell
from labkit.protocol.text import printable

if TYPE_CHECKING:
    import pandas as pd

LOCK_S = 1.0
"""How long `ask_to_stop` waits for the lock, then it does without: a result may take long to load, or never end."""


class WorkerFailed(RuntimeError):  # noqa: N818 - the contract's name
    """A rank failed, and with it the run.

    Attributes:
        rank: the global rank that failed first; None if the run was ended for a reason that is no rank's own.
        cause: that rank's own traceback, with the lines of the notebook's cells in it.
        run: the `Run`, with the history, output and results that had arrived.
        frames: the user's own frames of the ranks that failed, with what their variables were.
    """

    def __init__(self, diagnosis: Diagnosis, run: Any) -> None:
        diagnosis = diagnosis.printable()
        self.rank = diagnosis.rank
        self.cause = diagnosis.cause
        self.run = run
        self.diagnosis = diagnosis
        self.frames = frames_of(run.failures, diagnosis.rank, run.cells, run.attached)
        super().__init__(diagnosis.headline)

    def __str__(self) -> str:
        others = "".join(f"\n  {line}" for line in self.diagnosis.others)
        cause = "\n\n".join(filter(None, (self.cause, self.frames.of(self.rank).in_short)))
        text = f"{self.diagnosis.headline}\n\n{cause}\n{others}".rstrip()
        # The headline once more: of a long text, many tools show the last line alone (pytest, nbmake).
        last = f"{type(self).__name__}: {self.diagnosis.headline}"
        return "\n\n".join(filter(None, (text, *self.run.warnings, self.diagnosis.what_to_do, last)))

    def _render_traceback_(self) -> list[str]:
        """Show in a notebook what you can act on: the rank's own lines, not this package's."""
        return f"{type(self).__name__}: {self}".splitlines()

    def __reduce__(self) -> Any:
        return RuntimeError, (str(self),)


class RunRecord:
    """What is known of one run. Everything that others read or call holds `lock`."""

    def __init__(self, engine: Engine, world_size: int, name: str) -> None:
        self.name = printable(name)
        """What the run is called in charts and tables."""
        self.world_size = world_size
        """Number of ranks."""
        self.error: WorkerFailed | None = None
        """Why the run failed, or None."""
        self.engine = engine
        """The engine for this run's ranks."""
        self.lock = threading.RLock()
        """Held while what is known of the run changes."""
        self.over = threading.Event()
        """Set once the run has ended and its status, results and error are final."""
        self.cells: Mapping[str, Cell] = {}
        """The notebook's cells when the run was launched, by the file names that tracebacks use for them."""
        self.start_s = time.time()
        """When the run was launched, as `time.time()`."""
        self.end_s: float | None = None
        """When it ended, as `time.time()`."""
        self.stop_asked_s: float | None = None
        """When the run was asked to stop from here, as `time.monotonic()`, or None."""
        self.stop_grace_s: float | None = None
        """How long ranks that are asked to stop have, in s, where somebody has said so."""
        self.interrupts = 0
        """How often waiting for it was interrupted."""
        self.hang_notice = ""
        """Where ranks are that are long in coming to a first step, or wait in a cell for one that is gone."""
        self.paused_by: set[object] = set()
        """The observers for which `stall_s` does not run just now: somebody is at a prompt, or to come."""
        self._state = RunState(world_size, engine.failure_grace_s, time.monotonic())
        self._status = "running"

    @property
    def status(self) -> str:
        """ "running", "finished", "failed" or "stopped"; "queued" while a cluster has no machines for it yet."""
        return "queued" if self._status == "running" and self._state.is_queued else self._status

    @property
    def folder(self) -> Path | None:
        """Where a run on a cluster keeps what its ranks write: `labkit.attach(run.folder)` finds it again."""
        return self.engine.folder

    @property
    def history(self) -> pd.DataFrame:
        """What was logged: `rank`, `step`, `time_s` since the launch, a column per name. `to_csv(…)` is pandas' own."""
        return self.recorded.frame()

    @property
    def recorded(self) -> History:
        """What was logged so far, in the form that charts draw."""
        return self._state.recorded

    @property
    def results(self) -> list[Any]:
        """What the function returned, by rank, with its tensors on the CPU; None for a rank that has not returned.

        What this notebook could not load, because a module is missing here, say, is the exception that was raised;
        its `load()` tries again.
        """
        with self.lock:
            return [rank.result for rank in self._state.ranks]

    @property
    def returned(self) -> list[bool]:
        """Whether the function has returned, by rank."""
        with self.lock:
            return [rank.returned for rank in self._state.ranks]

    @property
    def failures(self) -> list[events.Failure | None]:
        """What each rank reported of its failure, by rank; None for a rank that has reported none."""
        with self.lock:
            return [rank.failure for rank in self._state.ranks]

    @property
    def rank_states(self) -> list[RankState]:
        """All that is known of each rank, by rank; it changes as the run goes on."""
        return self._state.ranks

    @property
    def output(self) -> list[str]:
        """What each rank printed to stdout and stderr, by rank; of very long output, the end."""
        with self.lock:
            return [str(rank.output) for rank in self._state.ranks]

    def output_tail(self, lines: int) -> list[str]:
        """Return the last lines that each rank printed, an unfinished one included."""
        with self.lock:
            return [rank.output.tail(lines) for rank in self._state.ranks]

    def take_new_output(self) -> list[list[str]]:
        """Return the complete lines that each rank printed since this was last called. For one reader."""
        with self.lock:
            return [rank.output.take_new() for rank in self._state.ranks]

    @property
    def attached(self) -> list[dict[str, bytes]]:
        """What ranks have sent besides, by rank and kind: their traces, say."""
        return [rank.attached for rank in self._state.ranks]

    @property
    def peak_bytes(self) -> list[int]:
        """Peak resident memory of each rank's process, in bytes; 0 for a rank that could not say.

        On reserved ranks without what earlier runs have left there: as much as a process of its own would have had.
        """
        return [rank.peak_bytes for rank in self._state.ranks]

    @property
    def peak_device_bytes(self) -> list[int]:
        """Peak memory that PyTorch allocated on each rank's GPU, in bytes; 0 on CPU."""
        return [rank.peak_device_bytes for rank in self._state.ranks]

    @property
    def devices(self) -> list[str]:
        """Where each rank computes, by rank: "cpu", "cuda:0", on a cluster with its machine; "" before it has begun."""
        return [rank.device for rank in self._state.ranks]

    @property
    def placement(self) -> str:
        """What is special about where the ranks compute: that they share a GPU, or why they have none."""
        return self._state.placement

    @property
    def attempt(self) -> int:
        """How often all ranks have been started again."""
        return self._state.attempt

    @property
    def pids(self) -> list[int]:
        """Process id of each rank, as far as it runs on this machine: for a debugger, say."""
        return list(self.engine.pids)

    @property
    def elapsed_s(self) -> float:
        """Seconds from the launch until the end, or until now."""
        return (self.end_s or time.time()) - self.start_s

    @property
    def states(self) -> list[str]:
        """Each rank: "queued", "starting", "running", "finished", "failed", "stopped" or "ended" (not by itself)."""
        with self.lock:
            return [rank.phase for rank in self._state.ranks]

    def progress(self, rank: int) -> tuple[Progress, int, int]:
        """Return where a rank stands, its log calls since it was last started, and how many it expects (0: unknown)."""
        progress, state = self.recorded.progress(rank), self._state.ranks[rank]
        return progress, progress.steps - state.steps_before, state.expected_steps

    def kill(self) -> None:
        """End the ranks now, without asking them, and without waiting until they have ended."""
        self.engine.kill()

    @property
    def stopping(self) -> bool:
        """Whether the run was asked to stop and is not over yet."""
        return self._state.stop_asked and not self.over.is_set()

    @property
    def notice(self) -> str:
        """What a cluster says of the run (its job and place in the queue, say), and the run's `warnings`. Where ranks
        are, if none of them has logged or printed anything for a minute after they began.
        """
        hang = "" if self.over.is_set() else self.hang_notice
        return printable("\n".join(filter(None, (self._state.said, hang))))

    @property
    def warnings(self) -> list[str]:
        """What went wrong without ending the run, a line each: records that could not be written, an observer of
        labkit's own that failed and was switched off.
        """
        return [*map(printable, self._state.warnings)]

    def ask_to_stop(self, grace_s: float | None = None) -> None:
        """Begin to stop the run, without waiting until it is over; asked again, only take another grace, in s."""
        has_lock = self.lock.acquire(timeout=LOCK_S)
        try:
            if self.over.is_set():
                return
            if grace_s is not None:
                self.stop_grace_s = grace_s
            if self.stop_asked_s is not None:
                return
            self._state.stop_asked, self.stop_asked_s = True, time.monotonic()
            if any(rank.phase in ("starting", "queued") for rank in self._state.ranks):
                self.engine.kill()  # nothing to keep
            else:
                self.engine.ask_to_stop()
        finally:
            if has_lock:
                self.lock.release()

    def __repr__(self) -> str:
        return f"<Run {self.name!r}: {self.status}, {self.world_size} ranks, {self.elapsed_s:.1f} s>"

    def __reduce__(self) -> Any:
        raise TypeError("a Run stays in the notebook that launched it; send run.history or run.results instead")
