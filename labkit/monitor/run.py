"""What the reader holds of a run: its history, results and output, and how to wait for it and stop it."""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from labkit.engines.base import Engine, end_unminded
from labkit.failures.facts import Diagnosis, RankFacts
from labkit.monitor.companion import Asked, Companion, companions
from labkit.monitor.follower import Follower
from labkit.monitor.going import going
from labkit.monitor.history import History, Progress
from labkit.monitor.observers import Observers
from labkit.monitor.results import load_again
from labkit.protocol import events, plugins
from labkit.protocol.job import Cell, Job
from labkit.protocol.pages import help_hint
from labkit.protocol.text import printable
from labkit.rank import notebook_main

if TYPE_CHECKING:
    import pandas as pd

    from labkit.failures.stacks import Stacks

END_S = 60.0
"""How long ranks that are being ended may take to be gone before `Run.stop` says that they are not."""

INTERRUPTED_S = 5.0
"""How long `Run.wait` waits for the end after a second interrupt: whoever presses it wants the cell back."""

logger = logging.getLogger("labkit")


class WorkerFailed(RuntimeError):  # noqa: N818 - the contract's name
    """A rank failed, and with it the run.

    Attributes:
        rank: the global rank that failed first; None if the run was ended for a reason that is no rank's own.
        cause: that rank's own traceback, with the lines of the notebook's cells in it.
        run: the `Run`, with the history, output and results that had arrived.
        frames: the reader's own frames of the ranks that failed, with what their variables were.
    """

    def __init__(self, diagnosis: Diagnosis, run: Run) -> None:
        diagnosis = diagnosis.printable()
        self.rank = diagnosis.rank
        self.cause = diagnosis.cause
        self.run = run
        self.diagnosis = diagnosis
        self.frames: Any = ()
        self.added = run.companions.add_to(self)
        """What plugins have to say of it, as text and as HTML."""
        super().__init__(diagnosis.headline)

    def __str__(self) -> str:
        others = "".join(f"\n  {line}" for line in self.diagnosis.others)
        added = "".join(f"\n\n{text}" for text, _ in self.added if text)
        text = f"{self.diagnosis.headline}\n\n{self.cause}{added}\n{others}".rstrip()
        return "\n\n".join(filter(None, (text, *self.run.warnings, self.diagnosis.what_to_do)))

    def _render_traceback_(self) -> list[str]:
        """Show in a notebook what the reader can act on: the rank's own lines, not this package's."""
        return f"{type(self).__name__}: {self}".splitlines()

    def __reduce__(self) -> Any:
        return RuntimeError, (str(self),)


class Run:
    """One launch of a function on some ranks: watch it, wait for it, stop it, and take what came of it.

    Made by `labkit.launch`. Shows itself in a cell: live while it runs, as a small still picture afterwards.
    """

    show: ClassVar[Callable[[Run], object] | None] = None
    """How a run shows itself in a cell. The user interface fills it in: this side knows nothing of charts."""
    draw: ClassVar[Callable[[Run, Sequence[int]], Any] | None] = None
    """How `figure` draws it; likewise."""

    def __init__(
        self,
        engine: Engine,
        world_size: int,
        name: str,
        timeout_s: float | None = None,
        beside: list[Companion] | None = None,
    ) -> None:
        self.name = printable(name)
        """What the run is called in charts and tables."""
        self.world_size = world_size
        """Number of ranks."""
        self.error: WorkerFailed | None = None
        """Why the run failed, or None."""
        self.engine = engine
        """What carries the ranks."""
        self.companions = Observers(companions(Asked()) if beside is None else beside)
        """What plugins have put beside the run."""
        for companion in self.companions:
            companion.run = self
        self._follower = Follower(engine, world_size, timeout_s, self._settle, self.companions)
        self._state = self._follower.state
        self.lock = self._follower.lock
        """Held while what is known of the run changes."""
        self.over = self._follower.over
        """Set once the run has ended and its status, results and error are final."""
        self._status = "running"
        self.interrupts = 0
        """How often whoever waited for it was interrupted."""

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

        What this notebook could not load, because a module is missing here, say, is a `labkit.UnloadedResult`, which
        says why; `load_results` tries again.
        """
        with self.lock:
            return [rank.result for rank in self._state.ranks]

    def load_results(self, map_location: Any = None) -> list[Any]:
        """Load what could not be loaded when it arrived, and return the results; `map_location` is as in `torch.load`.

        Raises what loading raises, with the first such rank noted; the others are loaded nevertheless.
        """
        load_again(self._state.ranks, self.lock, map_location)
        return self.results

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
    def rank_facts(self) -> list[RankFacts]:
        """What is known of each rank that may say why the run fails, by rank; it changes as the run goes on."""
        return list(self._state.ranks)

    @property
    def output(self) -> list[str]:
        """What each rank printed to stdout and stderr, by rank; of very long output, the end."""
        with self.lock:
            return [str(rank.output) for rank in self._state.ranks]

    def output_tail(self, lines: int) -> list[str]:
        """Return the last lines that each rank printed, an unfinished one included."""
        with self.lock:
            return [rank.output.tail(lines) for rank in self._state.ranks]

    @property
    def output_count(self) -> int:
        """How much the ranks have printed so far; another number whenever there is more."""
        return sum(rank.output.count for rank in self._state.ranks)

    def search_output(self, words: str) -> list[Any]:
        """Return the lines with these words in them, in any case, each with its ranks; those of the fewest first."""
        return plugins.first("search_output", (rank.output for rank in self._state.ranks), words) or []

    def take_new_output(self) -> list[list[str]]:
        """Return the complete lines that each rank printed since this was last called. For one reader."""
        if self.engine.shows_output:  # under the cell already
            return [[] for _ in self._state.ranks]
        with self.lock:
            return [rank.output.take_new() for rank in self._state.ranks]

    @property
    def attached(self) -> list[dict[str, bytes]]:
        """What plugins have sent from each rank, by rank and kind."""
        return [rank.attached for rank in self._state.ranks]

    trace: Any = property(lambda self: importlib.import_module("labkit.trace.trace").of_run(self))
    """What every rank did when, if launched with `trace=…`: a `labkit.trace.trace.Trace`. Else ValueError."""

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

    devices: Any = property(lambda self: [rank.device for rank in self._state.ranks])
    """Where each rank computes, by rank: "cpu", "cuda:0", on a cluster with its machine; "" before it has begun."""
    placement: Any = property(lambda self: self._state.placement)
    """What is special about where the ranks compute, in words: that they share a GPU, or why they have none."""

    @property
    def notice(self) -> str:
        """What a cluster says of the run (its job and place in the queue, say), and the run's `warnings`. Where ranks
        stand, if none of them has logged or printed anything for a minute after they began.
        """
        return printable("\n".join(filter(None, (self._state.said, self.companions.notice))))

    @property
    def warnings(self) -> list[str]:
        """What went wrong without ending the run, a line each: records that could not be written, an observer of
        labkit's own that failed and was switched off.
        """
        return [*map(printable, (*self._state.warnings, *self.companions.failed))]

    @property
    def attempt(self) -> int:
        """How often all ranks have been started again."""
        return self._state.attempt

    @property
    def pids(self) -> list[int]:
        """Process id of each rank, as far as it runs on this machine: for a debugger, say."""
        return list(self.engine.pids)

    @property
    def cells(self) -> Mapping[str, Cell]:
        """The notebook's cells when the run was launched, by the file names that tracebacks use for them."""
        return self._follower.cells

    @property
    def start_s(self) -> float:
        """When the run was launched, as `time.time()`."""
        return self._follower.start_s

    @property
    def elapsed_s(self) -> float:
        """Seconds from the launch until the end, or until now."""
        return self._follower.elapsed_s

    @property
    def states(self) -> list[str]:
        """Each rank: "queued", "starting", "running", "finished", "failed", "stopped" or "ended" (not by itself)."""
        with self.lock:
            return [rank.phase for rank in self._state.ranks]

    @property
    def cut_short(self) -> str:
        """Why ranks that were asked to stop were ended, or "" if they ended by themselves.

        "in vain": they waited for what cannot come; "late": they took longer than the grace.
        """
        return self._follower.cut_short

    def progress(self, rank: int) -> tuple[Progress, int]:
        """Return where a rank stands, and how many steps it expects to take (0 if it has not said)."""
        return self.recorded.progress(rank), self._state.ranks[rank].expected_steps

    def wait(self, timeout_s: float | None = None) -> Run:
        """Block until the run is over, and return it.

        Raises WorkerFailed if a rank failed, and TimeoutError if the run is still going after `timeout_s` seconds (it
        goes on). An interrupt (the notebook's ■ button, Ctrl-C) stops the run; a second one ends it at once, and this
        returns even if the end is not seen within some seconds.
        """
        deadline = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        interrupts = obeyed = 0
        leave_s = float("inf")
        while not self.over.is_set():
            try:
                if obeyed < interrupts:
                    obeyed = interrupts
                    self._obey(interrupts)
                self._follower.settle_if_dead()
                if interrupts < 2:
                    self.attend()
                self.over.wait(max(0.0, min(0.1, deadline - time.monotonic())))
                late = not self.over.is_set() and time.monotonic() >= deadline
            except KeyboardInterrupt:
                self.interrupts += 1
                late, deadline, interrupts = False, float("inf"), interrupts + 1
                if interrupts == 2:
                    leave_s = time.monotonic() + INTERRUPTED_S
            if interrupts > 2 or time.monotonic() > leave_s:
                logger.warning("run %r was told to end, and has not been seen to; run.stop() waits for it", self.name)
                break
            if late:
                raise TimeoutError(
                    f"run {self.name!r} is still going after {timeout_s} s; wait again, or end it with run.stop()\n"
                    + help_hint("still_going")
                )
        if self.error is not None:
            # The reader's own traceback where it is there, for a debugger; else none of an earlier `wait`.
            raise self.error.with_traceback(self.engine.trace)
        return self

    def _obey(self, interrupts: int) -> None:
        """Stop the run, or end it if it was to stop already."""
        if interrupts > 1 or self._state.stop_asked:
            self.engine.kill()
        self.ask_to_stop()

    def note(self, event: events.Change) -> None:
        """Note what a companion has found out."""
        self._follower.take(event)

    def attend(self) -> None:
        """Let companions speak with whoever waits for the run, in whose thread this is called."""
        self.companions.attend()

    def stop(self, grace_s: float | None = None) -> Run:
        """Stop the run and wait until it is over; what was logged, printed and returned by then is kept.

        Ranks are asked first: `worker.log` raises `labkit.Stopped` on every rank at a common step. Ranks that have not
        ended after `grace_s` are ended; at once, if they wait for what cannot come, each other in a collective, say. By
        default the grace is 2 s, 10 s on a cluster, and four of the run's longest recent steps. Stopping a run that is
        being stopped changes its grace if one is given: `run.stop(0)` ends it. Stopping one that is over does nothing.

        Raises TimeoutError if ranks that were to be ended are not gone a minute later: a cluster that cannot be
        reached, say. The run is followed on.
        """
        self.ask_to_stop(grace_s)
        self.wait_for_the_end()
        return self

    def wait_for_the_end(self) -> None:
        """Wait until a run that is being stopped is over, but not for ever; see `stop`. An interrupt ends it now."""
        began_s, interrupted = time.monotonic(), False
        while not self.over.is_set():
            try:
                self._follower.settle_if_dead()
                self.over.wait(0.1)
            except KeyboardInterrupt:
                if interrupted:
                    raise
                interrupted = True
                self.engine.kill()
            if time.monotonic() - began_s > self._follower.grace_s + END_S:
                said = f" ({self._state.notice})" if self._state.notice else ""
                raise TimeoutError(
                    f"run {self.name!r} was to end {END_S:g} s ago, but its ranks are not known to be gone{said}. "
                    "Whoever carries them may not be reachable; they are looked for on. run.stop() waits again\n"
                    + help_hint("still_going")
                )

    def ask_to_stop(self, grace_s: float | None = None) -> None:
        """Begin to stop the run, without waiting until it is over."""
        self._follower.ask_to_stop(grace_s)

    def kill(self) -> None:
        """End the ranks now, without asking them, and without waiting until they have ended."""
        self.engine.kill()

    @property
    def stop_asked_s(self) -> float | None:
        """When the run was asked to stop from here, as `time.monotonic()`, or None."""
        return self._follower.stop_asked_s

    @property
    def stopping(self) -> bool:
        """Whether the run was asked to stop and is not over yet."""
        return self._state.stop_asked and not self.over.is_set()

    def stacks(self) -> Stacks:
        """Return where every rank stands: its Python stack, the reader's own line first, also in native code.

        Works while ranks hang or compute; does not disturb them. Waits while answers may come: a second for a rank that
        is suspended, or whose native code keeps Python's lock; on a cluster ten. Raises ModuleNotFoundError where
        the plugin `stacks` has been left out.
        """
        found: Stacks | None = plugins.first("stacks", self)
        if found is None:
            raise ModuleNotFoundError("run.stacks() needs labkit.plugins.stacks, which is missing: reinstall labkit")
        return found

    def figure(self, ranks: Sequence[int] = ()) -> Any:
        """Return the chart of what was logged, a Plotly figure: a panel per name, a curve per rank and their mean; of
        more than 16 ranks a band, and curves of those that stand apart and of `ranks`.
        """
        assert Run.draw is not None, "labkit.launch has imported the room that draws"
        return Run.draw(self, ranks)

    @property
    def is_followed(self) -> bool:
        """Whether the ranks have been started, and are minded."""
        return self._follower.has_begun

    def start(self, job: Job) -> None:
        """Start the ranks and follow them in the background. Called once, by `labkit.launch`."""
        for hooks in plugins.those_with("rank_hooks"):
            job = job.with_hooks(hooks())
        job = self.companions.begin(job)
        try:
            self.engine.start(job)
            self.follow(job)
        except BaseException:
            if not self._follower.has_begun:
                end_unminded(self.engine)
            raise

    def follow(self, job: Job, stopping: bool = False) -> None:
        """Follow ranks that have been started, perhaps long ago. Called once, by `start` or `labkit.attach`.

        `stopping` is whether they were asked to stop before.
        """
        going.add(self)
        try:
            self._state.missing = notebook_main.finder(job)
            self._follower.begin(job.cells, job.start_s, stopping)
        except BaseException:
            if not self._follower.has_begun:
                going.discard(self)
            raise

    def _settle(self) -> None:
        diagnosis = self._follower.diagnosis
        try:
            if diagnosis is not None:
                self.error = WorkerFailed(diagnosis, self)
        finally:
            ended = "stopped" if self._state.stop_asked else "finished"
            self._status = ended if diagnosis is None else "failed"
            going.discard(self)

    def __repr__(self) -> str:
        return f"<Run {self.name!r}: {self.status}, {self.world_size} ranks, {self.elapsed_s:.1f} s>"

    def _ipython_display_(self) -> None:
        assert Run.show is not None, "labkit.launch has imported the room that shows"
        Run.show(self)

    def __reduce__(self) -> Any:
        raise TypeError("a Run stays in the notebook that launched it; send run.history or run.results instead")
