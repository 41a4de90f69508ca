"""A run: its state, history and results, and how to wait for it and stop it. The one place that reads records."""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import cloudpickle

from labkit.engines import holders
from labkit.engines.base import Engine
from labkit.monitor.diagnosis import RankFacts, Verdict, judge, judge_ended, judge_hang
from labkit.monitor.history import History, Progress
from labkit.monitor.output import RankOutput
from labkit.monitor.stacks import Frame, Stacks, Standing, is_complete, parse
from labkit.monitor.stopping import STEPS, Pace, Stopping
from labkit.protocol import events

if TYPE_CHECKING:
    import pandas as pd
    from plotly.graph_objects import Figure

    from labkit.protocol.job import Cell, Job

KILL_AGAIN_S = 0.5
"""Time after which ranks are ended once more: to look for their children is dear, and delays the end of all."""

RETURN_GRACE_S = 10.0
"""How long a rank may take to end its process after its function has returned."""

STARTING_S = 120.0
"""Least time that ranks may take to start, whatever `timeout_s` says; importing torch can be slow."""

STACKS_S = 1.0
"""How long ranks may take to say where they stand."""

USAGE_EVERY_S = 0.25
"""Time between two looks at the ranks' memory, the only way to know it of a rank that is killed."""

POLL_S = 0.05
"""How long to wait for what comes from ranks before looking at the clock again …"""

POLL_STOPPING_S = 0.01
"""… and once they were asked to stop."""

_live: weakref.WeakSet[Run] = weakref.WeakSet()


class WorkerFailed(RuntimeError):  # noqa: N818 - the contract's name
    """A rank failed, and with it the run.

    Attributes:
        rank: the global rank that failed first; None if the run was ended for a reason that is no rank's own.
        cause: that rank's own traceback, with the lines of the notebook's cells in it.
        run: the `Run`, with the history, output and results that had arrived.
    """

    def __init__(self, verdict: Verdict, run: Run) -> None:
        self.rank = verdict.rank
        self.cause = verdict.cause
        self.run = run
        self.verdict = verdict
        super().__init__(verdict.headline)

    def __str__(self) -> str:
        others = "".join(f"\n  {line}" for line in self.verdict.others)
        return f"{self.verdict.headline}\n\n{self.cause}\n{others}".rstrip()

    def _render_traceback_(self) -> list[str]:
        """Show in a notebook what the reader can act on: the rank's own lines, not this package's."""
        return f"{type(self).__name__}: {self}".splitlines()

    def __reduce__(self) -> Any:
        return RuntimeError, (str(self),)


class Presenter(Protocol):
    """What gives runs their looks. Set from outside, so that following a run needs no Plotly and no widgets."""

    def show(self, run: Run) -> None:
        """Show a run in the cell."""

    def figure(self, run: Run) -> Figure:
        """Return the chart of what a run has logged so far."""


class Run:
    """One launch of a function on some ranks: watch it, wait for it, stop it, and take what came of it.

    Made by `labkit.launch`. Shows itself in a cell: live while it runs, as a summary and a chart afterwards.
    """

    presenter: ClassVar[Presenter]
    """Set by `labkit.ui.present`."""

    def __init__(
        self,
        engine: Engine,
        world_size: int,
        name: str,
        timeout_s: float | None = None,
        when_returned: str = "has returned",
    ) -> None:
        self.name = name
        """What the run is called in charts and tables."""
        self.world_size = world_size
        """Number of ranks."""
        self.error: WorkerFailed | None = None
        """Why the run failed, or None."""
        self.peak_bytes: list[int] = [0] * world_size
        """Peak resident memory of each rank's process, in bytes; 0 for a rank that could not say."""
        self.peak_device_bytes: list[int] = [0] * world_size
        """Peak memory that PyTorch allocated on each rank's GPU, in bytes; 0 on CPU."""
        self.notice = ""
        """What a cluster says of the run: its job and place in the queue, say."""
        self.attempt = 0
        """How often all ranks have been started again."""
        self._engine = engine
        self._timeout_s = timeout_s
        self.recorded = History(world_size)
        """What was logged so far, in the form that charts draw."""
        self._states = ["starting"] * world_size
        self._results: list[Any] = [None] * world_size
        self._returned = [False] * world_size
        self._output = [RankOutput() for _ in range(world_size)]
        self._expected = [0] * world_size
        self._failures: list[events.Failure | None] = [None] * world_size
        self._exit_codes: list[int | None] = [None] * world_size
        self._exits_s = [float("inf")] * world_size
        self._out_of_memory = [False] * world_size
        self._unseen = [False] * world_size
        self._absent: set[int] = set()
        self._when_returned = when_returned
        """What is said of a rank that has done its part."""
        self._cells: dict[str, Cell] = {}
        self._stack_texts: dict[int, str] = {}
        self._stacks_asked: list[int] = []
        self._begun_again: set[int] = set()
        self._job_ended: events.JobEnded | None = None
        self._hang_asked_s: float | None = None
        self._hang: Verdict | None = None
        self._look_due_s = 0.0
        self._status = "running"
        self._stop_asked = False
        self._pace = Pace(world_size)
        self._stopping: Stopping | None = None
        self._stop_grace_s: float | None = None
        self.cut_short = ""
        """Why ranks that were asked to stop were ended: "in vain", they waited for what cannot come; "late", they took
        longer than the grace. "" if they ended by themselves."""
        self._failed = False
        self._kill_at_s = float("inf")
        self._lock = threading.RLock()
        self.over = threading.Event()
        """Set once the run has ended and its status, results and error are final."""
        self._start_s = time.time()
        self._end_s: float | None = None
        self._last_progress_s = time.monotonic()

    # What the reader asks of a run

    @property
    def status(self) -> str:
        """ "running", "finished", "failed" or "stopped"; "queued" while a cluster has no machines for it yet."""
        return "queued" if self._status == "running" and "queued" in self._states else self._status

    @property
    def folder(self) -> Path | None:
        """Where a run on a cluster keeps what its ranks write: `labkit.attach(run.folder)` finds it again."""
        return self._engine.folder.path if self._engine.folder else None

    @property
    def history(self) -> pd.DataFrame:
        """Everything logged so far: columns `rank`, `step`, `time_s` (since the launch), then one per logged name."""
        return self.recorded.frame()

    @property
    def results(self) -> list[Any]:
        """What the function returned, by rank; None for a rank that has not returned."""
        with self._lock:
            return list(self._results)

    @property
    def returned(self) -> list[bool]:
        """Whether the function has returned, by rank."""
        with self._lock:
            return list(self._returned)

    @property
    def failures(self) -> list[events.Failure | None]:
        """What each rank reported of its failure, by rank; None for a rank that has reported none."""
        with self._lock:
            return list(self._failures)

    @property
    def output(self) -> list[str]:
        """What each rank printed to stdout and stderr, by rank; of very long output, the end."""
        with self._lock:
            return [str(text) for text in self._output]

    def output_tail(self, lines: int) -> list[str]:
        """Give the last lines that each rank printed, an unfinished one included."""
        with self._lock:
            return [text.tail(lines) for text in self._output]

    def take_new_output(self) -> list[list[str]]:
        """Give the complete lines that each rank printed since this was last called. For one reader."""
        with self._lock:
            return [text.take_new() for text in self._output]

    @property
    def pids(self) -> list[int]:
        """Process id of each rank, as far as it runs on this machine: for a debugger, say."""
        return list(self._engine.pids)

    @property
    def elapsed_s(self) -> float:
        """Seconds from the launch until the end, or until now."""
        return (self._end_s or time.time()) - self._start_s

    @property
    def states(self) -> list[str]:
        """Each rank: "queued", "starting", "running", "finished", "failed", "stopped" or "ended" (not by itself)."""
        with self._lock:
            return list(self._states)

    def progress(self, rank: int) -> tuple[Progress, int]:
        """Say where a rank stands, and how many steps it expects to take (0 if it has not said)."""
        return self.recorded.progress(rank), self._expected[rank]

    def wait(self, timeout_s: float | None = None) -> Run:
        """Block until the run is over and give it back.

        Raises WorkerFailed if a rank failed, and TimeoutError if the run is still going after `timeout_s` seconds (it
        goes on). An interrupt (the notebook's ■ button, Ctrl-C) stops the run; a second one ends it at once.
        """
        deadline = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        while not self.over.is_set():
            try:
                self.over.wait(max(0.0, min(0.1, deadline - time.monotonic())))
                late = not self.over.is_set() and time.monotonic() >= deadline
            except KeyboardInterrupt:
                late, deadline = False, float("inf")
                if self._stop_asked:
                    self._engine.kill()
                self.ask_to_stop()
            if late:
                raise TimeoutError(
                    f"run {self.name!r} is still going after {timeout_s} s; wait again, or end it with run.stop()"
                )
        if self.error is not None:
            raise self.error
        return self

    def stop(self, grace_s: float | None = None) -> Run:
        """Stop the run and wait until it is over; what was logged, printed and returned by then is kept.

        Ranks are asked first: `worker.log` raises `labkit.Stopped` on every rank at a common step. Ranks that have not
        ended after `grace_s` are ended; at once, if they wait for what cannot come, each other in a collective, say. By
        default the grace is four of the run's longest recent steps, and 2 s at least, 10 s on a cluster. Stopping a
        run that is being stopped changes its grace if one is given: `run.stop(0)` ends it. Stopping one that is over
        does nothing.
        """
        self.ask_to_stop(grace_s)
        self.over.wait()
        return self

    def ask_to_stop(self, grace_s: float | None = None) -> None:
        """Begin to stop the run, without waiting until it is over."""
        with self._lock:
            if self.over.is_set():
                return
            if grace_s is not None:
                self._stop_grace_s = grace_s
            if self._stopping is not None:
                return
            self._stop_asked = True
            self._stopping = Stopping(time.monotonic(), self._engine.quiet_s)
            if {"starting", "queued"} & set(self._states):
                self._engine.kill()  # nothing to keep
            else:
                self._engine.ask_to_stop()

    def kill(self) -> None:
        """End the ranks now, without asking them, and without waiting until they have ended."""
        self._engine.kill()

    @property
    def stopping(self) -> bool:
        """Whether the run was asked to stop and is not over yet."""
        return self._stop_asked and not self.over.is_set()

    def stacks(self) -> Stacks:
        """Say where every rank stands: its Python stack, the reader's own line first, also in native code.

        Works while ranks hang or compute; does not disturb them. Waits a second at most for their answers.
        """
        with self._lock:
            self._ask_for_stacks()
        deadline = time.monotonic() + STACKS_S
        while not self._stacks_have_come() and time.monotonic() < deadline and not self.over.is_set():
            time.sleep(0.005)
        with self._lock:
            return self._standings()

    def figure(self) -> Figure:
        """Return the chart of what was logged: a curve per rank and their mean, a panel per name."""
        return self.presenter.figure(self)

    # Following the ranks

    def start(self, job: Job) -> None:
        """Start the ranks and follow them in the background. Called once, by `labkit.launch`."""
        self._engine.start(job)
        self.follow(job)

    def follow(self, job: Job, stopping: bool = False) -> None:
        """Follow ranks that have been started, perhaps long ago. Called once, by `start` or `labkit.attach`.

        `stopping` is whether they were asked to stop before.
        """
        self._cells, self._start_s, self._stop_asked = job.cells, job.start_s, stopping
        for event in self._engine.poll(timeout_s=0):
            self._take(event)
        _live.add(self)
        self._thread = threading.Thread(target=self._follow, name="labkit-run", daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        try:
            while None in self._exit_codes:
                for event in self._engine.poll(timeout_s=POLL_STOPPING_S if self._stopping else POLL_S):
                    with self._lock:
                        self._take(event)
                self._mind_the_time()
        finally:
            try:
                self._engine.close()
            finally:
                self._settle()  # whatever happens, who waits for the run does not wait for ever

    def _take(self, event: events.Event) -> None:
        rank = event.rank
        if isinstance(event, events.Log):
            if rank in self._begun_again:
                self._begun_again.remove(rank)
                self.recorded = self.recorded.before(rank, event.steps[0])
            self.recorded.add(event)
            self._pace.add(event)
            self._last_progress_s = time.monotonic()
        elif isinstance(event, events.Output):
            self._output[rank].add(event.text)
        elif isinstance(event, events.Started):
            self._states[rank] = "running"
            self._pace.begin(rank, self.elapsed_s)
            self._last_progress_s = time.monotonic()
        elif isinstance(event, events.Expect):
            self._expected[rank] = event.steps
        elif isinstance(event, events.Result):
            self._last_progress_s = time.monotonic()
            self._take_result(event)
        elif isinstance(event, events.Stopped):
            self._states[rank] = "stopped"
        elif isinstance(event, events.Failure):
            self._take_failure(event)
        elif isinstance(event, events.Absent):
            self._absent.add(rank)
            self._states[rank], self._exit_codes[rank] = "idle", 0
        elif isinstance(event, events.Memory):
            self.peak_bytes[rank], self.peak_device_bytes[rank] = event.peak_bytes, event.peak_device_bytes
        elif isinstance(event, events.Stack):
            self._stack_texts[rank] = self._stack_texts.get(rank, "") + event.text
        elif isinstance(event, events.Waits):
            if self._stopping is not None:
                self._stopping.take(event, time.monotonic())
        elif isinstance(event, events.Exit):
            self._exit_codes[rank] = event.code
            self._out_of_memory[rank], self._unseen[rank] = event.out_of_memory, event.unseen
            self._output[rank].end()
            self._take_exit(event)
        elif isinstance(event, events.Notice):
            self._take_notice(event)
        elif isinstance(event, events.Restarted):
            self._begin_again(event.attempt)
        elif isinstance(event, events.JobEnded):
            self._job_ended = event

    def _take_notice(self, notice: events.Notice) -> None:
        self.notice = notice.text
        self._last_progress_s = time.monotonic()
        if not notice.queued:
            self._states = ["starting" if state == "queued" else state for state in self._states]
        elif self.status != "queued":
            self._forget_the_attempt("queued")

    def _begin_again(self, attempt: int) -> None:
        self.attempt = attempt
        self._begun_again = set(range(self.world_size))
        self._last_progress_s = time.monotonic()
        self._forget_the_attempt("starting")

    def _forget_the_attempt(self, state: str) -> None:
        """Forget how the ranks fared. What they logged is kept, up to where they begin again."""
        self._states = [state] * self.world_size
        self._results, self._returned = [None] * self.world_size, [False] * self.world_size
        self._failures, self._exit_codes = [None] * self.world_size, [None] * self.world_size
        self._exits_s, self._out_of_memory = [float("inf")] * self.world_size, [False] * self.world_size
        self._failed = False

    def _take_result(self, event: events.Result) -> None:
        rank = event.rank
        try:
            self._results[rank] = cloudpickle.loads(event.blob)
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            self._take_failure(
                events.Failure(rank, self.elapsed_s, "its result was being unpacked in the notebook", what, what)
            )
            return
        self._returned[rank] = True
        self._states[rank] = "finished"
        if all(self._returned):
            self._kill_at_s = min(self._kill_at_s, time.monotonic() + RETURN_GRACE_S)

    def _take_failure(self, failure: events.Failure) -> None:
        self._failures[failure.rank] = failure
        self._states[failure.rank] = "failed"
        self._rank_failed()

    def _take_exit(self, event: events.Exit) -> None:
        rank = event.rank
        self._exits_s[rank] = event.at_s - self._start_s if event.at_s else self.elapsed_s
        if self._states[rank] in ("queued", "starting", "running"):
            if self._engine.killed(rank):
                self._states[rank] = "ended"
            else:
                self._states[rank] = "failed"
                self._rank_failed()

    def _rank_failed(self) -> None:
        # A rank that fails after the run was asked to stop is a consequence of stopping.
        self._failed = self._failed or not self._stop_asked
        self._kill_at_s = min(self._kill_at_s, time.monotonic() + self._engine.failure_grace_s)

    def _mind_the_time(self) -> None:
        now = time.monotonic()
        if self._stopping is not None:
            with self._lock:
                self._mind_the_stop(self._stopping, now)
        if now >= self._kill_at_s:
            self._kill_at_s = now + KILL_AGAIN_S
            self._engine.kill()
            return
        if now > self._look_due_s:
            with self._lock:
                self._look_at_usage(now)
        if self._timeout_s is not None and not self._stop_asked and self.status != "queued":
            patience_s = max(self._timeout_s, STARTING_S) if "starting" in self._states else self._timeout_s
            if now - self._last_progress_s > patience_s:
                with self._lock:
                    self._end_the_hang(now)

    def _mind_the_stop(self, stopping: Stopping, now: float) -> None:
        """End ranks that were asked to stop when their grace is over, or nothing can come of it; see `stopping`."""
        grace_s = self._stop_grace_s
        if grace_s is None:
            grace_s = max(self._engine.stop_grace_s, STEPS * self._pace.longest_step_s)
        end_s = stopping.began_s + grace_s
        ended = zip(self._states, self._exit_codes, strict=True)
        living = {r for r, (state, code) in enumerate(ended) if state in ("starting", "running") and code is None}
        in_vain = stopping.in_vain(living, end_s, now)
        if self.cut_short:
            return
        if in_vain or now >= end_s:
            self.cut_short = "in vain" if in_vain else "late"
            self._kill_at_s = min(self._kill_at_s, now)
        elif stopping.ask_again(living, now):
            self._engine.ask_to_stop()

    def _look_at_usage(self, now: float) -> None:
        self._look_due_s = now + USAGE_EVERY_S
        usage = [used for rank in range(self.world_size) if (used := self._engine.usage(rank)) is not None]
        if usage:
            self.peak_bytes = [max(seen, peak) for seen, (peak, _) in zip(self.peak_bytes, usage, strict=True)]

    def _end_the_hang(self, now: float) -> None:
        """Ask the silent ranks where they stand, and end the run when they have said so."""
        if self._hang_asked_s is None:
            self._hang_asked_s = now
            self._ask_for_stacks()
        elif self._hang is None and (self._stacks_have_come() or now - self._hang_asked_s > STACKS_S):
            silent = [rank for rank in range(self.world_size) if not self._returned[rank] and rank not in self._absent]
            first = min(silent, key=lambda rank: self.recorded.progress(rank).time_s)
            assert self._timeout_s is not None
            self._hang = judge_hang(self._standings(), self._timeout_s, first)
            if self._hang.rank is not None:
                self._states[self._hang.rank] = "failed"
            self._failed, self._kill_at_s = True, now

    def _ask_for_stacks(self) -> None:
        self._stack_texts = {}
        self._stacks_asked = self._engine.ask_for_stacks() if not self.over.is_set() else []

    def _stacks_have_come(self) -> bool:
        return all(is_complete(self._stack_texts.get(rank, "")) for rank in self._stacks_asked)

    def _standings(self) -> Stacks:
        found = Stacks()
        for rank, state in enumerate(self._states):
            frames = parse(self._stack_texts.get(rank, ""))
            if rank in self._absent:
                frames, note = [], "has no part in the cell"
            elif self._returned[rank]:
                frames, note = [], self._when_returned
            elif self._exit_codes[rank] is not None or state == "failed":
                frames, note = [], f"has ended ({state})"
            else:
                note = "is still starting" if state in ("queued", "starting") else "did not answer"
            found.append(Standing(rank, frames, self._cells, note))
        return found

    def _settle(self) -> None:
        with self._lock:
            self._end_s = min(time.time(), self._start_s + max(self._exits_s))
            ended = self._job_ended if not self._stop_asked else None
            if self._failed or ended is not None:
                facts = [self._facts(rank) for rank in range(self.world_size)]
                verdict = self._hang or (judge_ended(ended, facts) if ended else judge(facts))
                self.error = WorkerFailed(verdict, self)
                self._status = "failed"
            elif self._stop_asked:
                self._status = "stopped"
            else:
                self._status = "finished"
        _live.discard(self)
        self.over.set()

    def _facts(self, rank: int) -> RankFacts:
        output, _, dump = self._output[rank].tail(300).partition("Fatal Python error: ")
        failure = self._failures[rank]
        frames = [Frame(*frame) for frame in failure.frames] if failure else parse(dump, thread="current")
        return RankFacts(
            rank,
            failure=failure,
            returned=self._returned[rank],
            exit_code=self._exit_codes[rank],
            exit_s=self._exits_s[rank],
            ended_by_us=self._engine.killed(rank),
            last_step=self.recorded.progress(rank).last_step,
            output_end=output,
            peak_bytes=self.peak_bytes[rank],
            out_of_memory=self._out_of_memory[rank],
            unseen=self._unseen[rank],
            standing=Standing(rank, frames, self._cells) if frames else None,
        )

    # Showing

    def __repr__(self) -> str:
        return f"<Run {self.name!r}: {self.status}, {self.world_size} ranks, {self.elapsed_s:.1f} s>"

    def _ipython_display_(self) -> None:
        self.presenter.show(self)

    def __reduce__(self) -> Any:
        raise TypeError("a Run stays in the notebook that launched it; send run.history or run.results instead")


def run_of(engine: Engine) -> Run | None:
    """Return the run that this engine carries, if it is not over."""
    return next((run for run in list(_live) if run._engine is engine), None)


class _Runs:
    """All runs that are going, as a holder of processes."""

    def processes(self) -> list[holders.HeldProcess]:
        return [one for run in list(_live) for one in self._of(run)]

    def end(self, pid: int) -> None:
        for run in list(_live):
            if pid in run.pids:
                run.ask_to_stop()

    def _of(self, run: Run) -> list[holders.HeldProcess]:
        ranks = zip(run.pids, run.states, strict=False)  # no pids where the ranks are on another machine
        return [
            one
            for rank, (pid, state) in enumerate(ranks)
            for one in holders.held("run", run.name, rank, pid, state, self)
        ]


_runs = _Runs()
holders.add(_runs)


@atexit.register
def _end_live_runs() -> None:
    """Leave no rank behind when the notebook's kernel, or a script, ends."""
    ending = [run for run in _live if not run._engine.outlives_notebook]
    for run in ending:
        run.ask_to_stop()
        run._engine.kill()
    for run in ending:
        run.over.wait(5)  # until its processes have been waited for
