"""What you hold of a run: its history, results and output, and how to wait for it and stop it."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, overload

from labkit.debugger import Debugger
from labkit.engines.base import Engine, kill_unmonitored
from labkit.failures.stacks import Stacks
from labkit.monitor.active_runs import active_runs
from labkit.monitor.asking import Asking
from labkit.monitor.follower import Follower
from labkit.monitor.memory import MemoryWatch
from labkit.monitor.observers import Observers, RunObserver
from labkit.monitor.record import RunRecord, WorkerFailed
from labkit.protocol.job import Job
from labkit.protocol.pages import help_hint
from labkit.protocol.text import printable
from labkit.ui import kernel, present

if TYPE_CHECKING:
    from labkit.trace.trace import Trace

END_S = 60.0
"""How long ranks that are being ended may take to be gone before `Run.stop` says that they are not."""

INTERRUPTED_S = 5.0
"""How long `Run.wait` waits for the end after a second interrupt: who presses it wants the cell back."""

logger = logging.getLogger("labkit")


class RunInterrupted(KeyboardInterrupt):  # noqa: N818 - what Python calls it
    """An interrupt (the notebook's ■ button, Ctrl-C) has stopped a run that was waited for.

    Attributes:
        run: the `Run`, with what was logged, printed and returned; also `labkit.runs[-1]`.
        where: where the ranks were when the interrupt came, if nobody watches the notebook; else "".
    """

    def __init__(self, run: Run) -> None:
        self.run, self.where = run, run.where_interrupted
        runs.keep(run)
        how = "stopped" if run.over.is_set() else "told to stop, but has not been seen to stop"
        said = f"run {run.name!r} was interrupted and {how}"
        kept = "What was logged, printed and returned is kept in labkit.runs[-1]"
        super().__init__("\n\n".join(filter(None, (said, self.where, kept))))

    def _render_traceback_(self) -> list[str]:
        """Show in a notebook what has become of the run, and not this package's lines."""
        return f"KeyboardInterrupt: {self}".splitlines()


class Run(RunRecord):
    """One launch of a function on some ranks: watch it, wait for it, stop it, and take what came of it.

    Made by `labkit.launch`. Shows itself in a cell: live while it runs, as a small still picture afterwards.
    """

    def __init__(
        self,
        engine: Engine,
        world_size: int,
        name: str,
        stall_s: float | None = None,
        observers: Sequence[RunObserver] = (),
    ) -> None:
        super().__init__(engine, world_size, name)
        self._asking = Asking()
        self._debugger = next((each for each in observers if isinstance(each, Debugger)), None)
        self._observers = Observers([MemoryWatch(), self._asking, *observers])
        for observer in self._observers:
            observer.run = self
        self._follower = Follower(self, self._observers, self._asking, stall_s, self._settle)
        self.launched_by: kernel.Execution | None = None
        """The execution of a cell that has launched it."""
        self.is_watched = True
        """Whether a person sees it. If nobody does, the first interrupt asks the ranks where they are."""
        self.where_interrupted = ""
        """Where the ranks were then."""

    @property
    def trace(self) -> Trace:
        """What every rank did when, if launched with `trace=…`. Raises ValueError if it was not."""
        from labkit.trace.trace import of_run  # not above: it imports what draws

        return of_run(self)

    @property
    def stop_outcome(self) -> str:
        """ "late" if ranks that were asked to stop took longer than the grace and were ended; else ""."""
        return self._follower.stop_outcome

    def wait(self, timeout_s: float | None = None) -> Run:
        """Block until the run is over, and return it.

        Raises WorkerFailed if a rank failed, and TimeoutError if the run is still going after `timeout_s` seconds (it
        goes on). An interrupt (the notebook's ■ button, Ctrl-C) stops the run, and then raises RunInterrupted, a
        KeyboardInterrupt; a second one ends the run at once, and this raises even if the end is not seen within some
        seconds.
        """
        before = self.interrupts
        self._until_over(timeout_s=timeout_s)
        if self.error is not None:
            raise self.error.with_traceback(None)  # without that of an earlier `wait`
        if self.interrupts > before:
            raise RunInterrupted(self)
        return self

    def _until_over(
        self, told: int = 0, obeyed: int = 0, grace_s: float | None = None, timeout_s: float | None = None
    ) -> None:
        """Wait until the run is over. The first interrupt stops it, the second ends it, the third leaves.

        Args:
            told: How many interrupts count before any comes: 1 if the run is to stop.
            obeyed: How many of them it has obeyed.
            grace_s: As of `stop`.
            timeout_s: How long to wait, unless an interrupt comes.
        """
        began_s = time.monotonic()
        deadline = float("inf") if timeout_s is None else began_s + timeout_s
        while not self.over.is_set():
            try:
                if told > obeyed:
                    obeyed = told
                    self._stop_or_end(told, grace_s)
                    began_s = time.monotonic()
                if told:
                    deadline = began_s + (INTERRUPTED_S if told > 1 else self._follower.grace_s + END_S)
                else:
                    self.attend()
                is_late = self._pause(deadline)
            except KeyboardInterrupt:
                self.interrupts += 1
                told, is_late = max(told, int(self._state.stop_asked)) + 1, False
            if told > 2 or (is_late and told == 2):
                logger.warning(
                    "run %r was told to stop, but has not been seen to stop; run.stop() waits for it", self.name
                )
                raise RunInterrupted(self)
            if is_late:
                raise TimeoutError(f"{self._still_going(timeout_s if not told else None)}\n{help_hint('still_going')}")

    def _pause(self, deadline: float) -> bool:
        """Wait a little; return whether it is late."""
        self.over.wait(max(0.0, min(0.1, deadline - time.monotonic())))
        return not self.over.is_set() and time.monotonic() >= deadline

    def _stop_or_end(self, told: int, grace_s: float | None) -> None:
        if self.interrupts:
            self.ask_where_interrupted()
        if told > 1:
            self.engine.kill()
        self.ask_to_stop(0 if told > 1 else grace_s)

    def _still_going(self, timeout_s: float | None) -> str:
        if timeout_s is not None:
            return f"run {self.name!r} is still going after {timeout_s} s; wait again, or end it with run.stop()"
        said = f" ({self._state.notice})" if self._state.notice else ""
        return (
            f"run {self.name!r} was to end {END_S:g} s ago, but its ranks are not known to be gone{said}. "
            "The launcher may not be reachable; labkit keeps looking for them. run.stop() waits again"
        )

    def ask_where_interrupted(self) -> None:
        """Note where the ranks are, if nobody watches; they are about to be stopped."""
        if self.is_watched or self.where_interrupted or self._state.stop_asked or self.over.is_set():
            return
        try:
            self.where_interrupted = printable(str(self.stacks()))
        except Exception as error:  # it is not to keep the run from being stopped
            self.where_interrupted = f"where its ranks were could not be asked: {type(error).__name__}: {error}"

    def attend(self) -> None:
        """Let the debugger ask in the thread that waits for the run, which calls this."""
        if self._debugger is not None:
            self._observers.ask(self._debugger, lambda debugger: debugger.attend(), None)

    def stop(self, grace_s: float | None = None) -> Run:
        """Stop the run and wait until it is over; what was logged, printed and returned by then is kept.

        Ranks are asked first: `worker.log` raises `labkit.Stopped` on every rank at a common step. Ranks that have not
        ended after `grace_s` are ended. By default the grace is 2 s, 10 s on a cluster, and four of the run's longest
        recent steps. Stopping a run that is being stopped changes its grace if one is given: `run.stop(0)` ends it.
        Stopping one that is over does nothing.

        Raises TimeoutError if ranks that were to be ended are not gone a minute later: a cluster that cannot be
        reached, say. labkit keeps following the run.
        """
        self._until_over(told=1, grace_s=grace_s)
        return self

    def stop_interrupted(self, grace_s: float | None = None) -> None:
        """Stop a run whose cell was interrupted, and wait until it is over; another interrupt ends it at once."""
        self.interrupts += 1
        self._until_over(told=1, grace_s=grace_s)

    def wait_until_over(self) -> None:
        """Wait until a run is over that is being stopped; see `stop`. An interrupt ends it."""
        self._until_over(told=1, obeyed=1)

    def stacks(self) -> Stacks:
        """Return where every rank stands: its Python stack, the user's own line first, also in native code.

        Works while ranks hang or compute; does not disturb them. Waits 5 s for a rank that does not answer, because it
        is suspended, or because its native code keeps Python's lock; on a cluster 10 s. Raises RuntimeError if labkit's
        own part in it has failed before.
        """
        if self._asking not in self._observers:
            why = "; ".join(self.warnings)
            raise RuntimeError(f"the ranks cannot be asked where they stand: {why}\n{help_hint('hang')}")
        return self._asking.ask_and_wait()

    def all_may_wait_for(self, rank: int) -> bool:
        """Ask the ranks; return whether all that are at work wait in calls that need this one, as far as is known."""
        return self._asking in self._observers and self._asking.all_may_wait_for(rank)

    def figure(self) -> Any:
        """Return the chart of what was logged, a Plotly figure: a panel per name, a curve per rank and their mean; of
        more than 16 ranks the least, mean and greatest value.
        """
        from labkit.ui import charts  # not above: it imports Plotly, which takes a second

        return charts.of_run(self)

    def is_of_an_earlier_execution(self, other: Run) -> bool:
        """Whether an earlier execution of the cell that has launched the other run has launched this one."""
        mine, its = self.launched_by, other.launched_by
        return mine is not None and its is not None and mine.cell == its.cell and mine.number != its.number

    @property
    def is_followed(self) -> bool:
        """Whether the ranks have been started and are followed."""
        return self._follower.has_begun

    def start(self, job: Job) -> None:
        """Start the ranks and follow them in the background. Called once, by `labkit.launch`."""
        job = self._observers.begin(job)
        try:
            self.engine.start(job)
            self.follow(job)
        except BaseException:
            if not self._follower.has_begun:
                kill_unmonitored(self.engine)
            else:
                self.stop_interrupted(0)
            raise

    def follow(self, job: Job, stopping: bool = False) -> None:
        """Follow ranks that have been started, perhaps long ago. Called once, by `start` or `labkit.attach`.

        `stopping` is whether they were asked to stop before.
        """
        active_runs.add(self)
        runs.add(self)
        try:
            self._follower.begin(job.cells, job.start_s, stopping)
        except BaseException:
            if not self._follower.has_begun:
                active_runs.discard(self)
            raise

    def _settle(self) -> None:
        diagnosis = self._follower.diagnosis
        try:
            if diagnosis is not None:
                self.error = WorkerFailed(diagnosis, self)
        finally:
            ended = "stopped" if self._state.stop_asked else "finished"
            self._status = ended if diagnosis is None else "failed"
            active_runs.discard(self)

    def _ipython_display_(self) -> None:
        present.show(self)


class Runs(Sequence[Run]):
    """The runs of this notebook that are still there, in the order of their launches: `labkit.runs[-1]` is the last.

    A run is there as long as something holds it: a variable, or IPython's `Out`. The run that was interrupted last is
    held here, because its cell could not.
    """

    def __init__(self) -> None:
        self._launched: list[weakref.ref[Run]] = []
        self._interrupted: Run | None = None

    def add(self, run: Run) -> None:
        """Take a run that has begun."""
        self._launched = [ref for ref in self._launched if ref() is not None] + [weakref.ref(run)]

    def keep(self, run: Run) -> None:
        """Hold a run that was interrupted."""
        self._interrupted = run

    def _there(self) -> list[Run]:
        return [run for ref in self._launched if (run := ref()) is not None]

    def __len__(self) -> int:
        return len(self._there())

    @overload
    def __getitem__(self, index: int) -> Run: ...

    @overload
    def __getitem__(self, index: slice) -> list[Run]: ...

    def __getitem__(self, index: int | slice) -> Run | list[Run]:
        return self._there()[index]

    def __iter__(self) -> Iterator[Run]:
        return iter(self._there())

    def __repr__(self) -> str:
        return repr(self._there())


runs = Runs()
"""The runs of this notebook, the last one last; after an interrupt, `labkit.runs[-1]` is the run that it stopped."""
