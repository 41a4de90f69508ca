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
from labkit.monitor.follower import Follower
from labkit.monitor.memory import MemoryWatch
from labkit.monitor.observers import Observers, RunObserver
from labkit.monitor.record import RunRecord, WorkerFailed
from labkit.monitor.stack_query import StackQuery
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
        how = "stopped" if run.over.is_set() else "told to end, and has not been seen to"
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
        self._stack_query = StackQuery()
        self._debugger = next((each for each in observers if isinstance(each, Debugger)), None)
        self._observers = Observers([MemoryWatch(), self._stack_query, *observers])
        self.switched_off = self._observers.failed
        for observer in self._observers:
            observer.run = self
        self._follower = Follower(self, self._observers, self._stack_query, stall_s, self._settle)
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
            raise self.error.with_traceback(None)  # without that of an earlier `wait`
        if interrupts:
            raise RunInterrupted(self)
        return self

    def ask_where_interrupted(self) -> None:
        """Note where the ranks are, if nobody watches; they are about to be stopped."""
        if self.is_watched or self.where_interrupted or self._state.stop_asked or self.over.is_set():
            return
        try:
            self.where_interrupted = printable(str(self.stacks()))
        except Exception as error:  # it is not to keep the run from being stopped
            self.where_interrupted = f"where its ranks were could not be asked: {type(error).__name__}: {error}"

    def _obey(self, interrupts: int) -> None:
        """Stop the run, or end it if it was to stop already."""
        self.ask_where_interrupted()
        if interrupts > 1 or self._state.stop_asked:
            self.engine.kill()
        self.ask_to_stop()

    def interrupt(self) -> None:
        """Ask a run in this process to stop. Raises KeyboardInterrupt if it was asked before."""
        self.interrupts += 1
        if self.stopping:
            raise KeyboardInterrupt
        self.ask_to_stop()

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
        reached, say. The run is followed on.
        """
        self.ask_to_stop(grace_s)
        self.wait_until_over()
        return self

    def stop_interrupted(self, grace_s: float | None = None) -> None:
        """Stop a run whose cell was interrupted, and wait until it is over; another interrupt ends it at once."""
        self.interrupts += 1
        try:
            self.ask_where_interrupted()
            self.stop(grace_s)
        except KeyboardInterrupt:
            self.interrupts += 1
            self.stop(0)

    def wait_until_over(self) -> None:
        """Wait, but not indefinitely, until a run that is being stopped is over; see `stop`. An interrupt ends it."""
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

    def stacks(self) -> Stacks:
        """Return where every rank stands: its Python stack, the user's own line first, also in native code.

        Works while ranks hang or compute; does not disturb them. Waits 5 s for a rank that does not answer, because it
        is suspended, or because its native code keeps Python's lock; on a cluster 10 s. Raises RuntimeError if labkit's
        own part in it has failed before.
        """
        if self._stack_query not in self._observers:
            why = "; ".join(self.switched_off)
            raise RuntimeError(f"the ranks cannot be asked where they stand: {why}\n{help_hint('hang')}")
        return self._stack_query.ask_and_wait()

    def all_may_wait_for(self, rank: int) -> bool:
        """Ask the ranks; return whether all that are at work wait in calls that need this one, as far as is known."""
        return self._stack_query in self._observers and self._stack_query.all_may_wait_for(rank)

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
        """Whether the ranks have been started, and are minded."""
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
