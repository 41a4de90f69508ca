"""A session's ranks under SLURM, torchrun or Ray: their processes, the job on them, and the launcher's notices."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Sequence

from labkit.launchers import job_events
from labkit.launchers.directory_engine import DirectoryEngine, folder_gone
from labkit.launchers.launcher_job import LauncherJob, RanksSeen
from labkit.launchers.run_directory.directory import RunDirectory
from labkit.launchers.run_directory.files import is_missing
from labkit.protocol.pages import help_hint
from labkit.session.directory import SessionDirectory
from labkit.session.processes import Processes
from labkit.session.ranks import Replaced, ReservedRank, duration
from labkit.system import host

RECEIVE_EVERY_S = 0.1
"""Time between two looks at what the launcher says."""

LEAVE_S = 5.0
"""How long the ranks may take to leave before the launcher is told to end them."""

KILL_S = 10.0
"""How long a rank may take to be ended by its supervisor; then its node counts as lost."""


class ReservedJobEngine(DirectoryEngine):
    """Carries one job on the ranks, as far as the ranks know it."""

    def __init__(self, world_size: int, directory: RunDirectory, number: int) -> None:
        super().__init__(world_size, directory)
        self.number = number
        """Of the job, among those of the session."""
        self.closed = threading.Event()
        """Set once the ranks are given back."""
        self._ending: job_events.JobEnded | None = None

    def end_with(self, ending: job_events.JobEnded) -> None:
        """Note that the launcher has ended the ranks."""
        with self._lock:
            self._ending = ending


class ClusterRanks:
    """Ranks that a launcher has started. The supervisor of one that has ended starts a new process in its place.

    That one job at a time is on the ranks is the session's to see to.
    """

    is_here = False
    has_files = True
    handles_idleness = True
    """The first rank's supervisor does, also when there is no notebook."""

    def __init__(self, launched: LauncherJob, known: list[int]) -> None:
        self.world_size, self.kind, self.outlives_notebook = (
            launched.world_size,
            launched.kind,
            launched.outlives_notebook,
        )
        self.launched = launched
        self.directory = SessionDirectory(launched.directory.path)
        self.processes = Processes(self.directory, known)
        self._lock = self.processes.lock
        self.notice, self.waits = "", False
        """What the launcher says, and whether it has no machines for the ranks just now."""
        self._have_begun = False
        self.ready_s = float("inf")
        """When all ranks had been started and were ready, as `time.monotonic()`; infinite before."""
        self._engine: ReservedJobEngine | None = None
        self._newest = 0
        """The last job that this notebook knows of."""
        self._is_closed = threading.Event()
        self._when_over: Callable[[str], None] = lambda why: None

    def begin(self) -> None:
        """Follow the launcher in the background."""
        self._receive()
        threading.Thread(target=self._follow, name="labkit-session", daemon=True).start()

    def when_over(self, call: Callable[[str], None]) -> None:
        """Have something called with the reason once the launcher has ended the ranks for good."""
        self._when_over = call

    # What the session does with the ranks

    def new_rendezvous(self) -> None:
        """Return nothing: rank 0 opens the store through which ranks join a group."""

    def take(self, engine: ReservedJobEngine) -> None:
        """Have what the launcher says told to a job, too. Raises RuntimeError if the ranks are closed."""
        with self._lock:
            if self._is_closed.is_set():
                raise RuntimeError(f"these ranks are closed; make a new labkit.Session\n{help_hint('session')}")
            self._engine, self._newest = engine, engine.number

    def give_back(self, engine: ReservedJobEngine) -> None:
        """Take the ranks back from a job."""
        with self._lock:
            if self._engine is engine:
                self._engine = None

    @property
    def were_used_elsewhere(self) -> bool:
        """Whether another notebook has used the ranks since this one did."""
        return self.directory.newest_job() != self._newest

    def look(self) -> None:
        """Ask the launcher at once how the ranks are."""
        self.launched.look()

    # Which process a rank is

    @property
    def incarnations(self) -> list[int]:
        """The number of each rank's process; of one that has ended, its successor's."""
        return self.processes.incarnations()

    def has(self, rank: int, incarnation: int) -> bool:
        """Whether a rank's process is still this one."""
        return self.incarnations[rank] == incarnation

    def exit_code(self, rank: int) -> int:
        """Return how the process of a rank ended that was the last to end there."""
        return self.processes.exit_code(rank)

    def replace(self) -> None:
        """Do nothing: the supervisors do it."""

    def take_replaced(self) -> list[Replaced]:
        """Return the ranks that are new since this was last called."""
        return self.processes.take_replaced()

    def lose(self, ranks: Sequence[int], why: str) -> None:
        """Count the processes of ranks as gone, though nobody has seen them end."""
        self.processes.lose(ranks, why)

    @property
    def pids(self) -> list[int]:
        """Process ids by rank, each on its node; none once they are gone."""
        return [] if self._is_closed.is_set() else [process.pid for process in self.processes.now()]

    @property
    def pids_here(self) -> dict[int, int]:
        """Process ids, by rank, of those that are on this machine."""
        here = host.node()
        now = [] if self._is_closed.is_set() else self.processes.now()
        return {rank: process.pid for rank, process in enumerate(now) if process.node == here}

    def node(self, rank: int) -> str:
        """Return the node of a rank; "" if it has none yet."""
        return self.processes.node(rank)

    def ranks(self) -> list[ReservedRank]:
        """Return what is known of each rank."""
        if self._is_closed.is_set():
            return []
        with self._lock:
            return [
                ReservedRank(
                    rank,
                    self._state(rank),
                    f"{process.node}, process {process.pid}" if process.node and not self.waits else "",
                    note=self.processes.notes[rank],
                )
                for rank, process in enumerate(self.processes.now())
            ]

    def _state(self, rank: int) -> str:
        if self.waits:
            return "queued"
        return "idle" if self.processes.is_idle(rank) else "starting"

    def notices(self) -> list[str]:
        """Return what else there is to say of the ranks: the launcher's job, and how long it may stay."""
        left_s = self.launched.time_left_s
        left = [f"{duration(left_s)} left of its time limit"] if math.isfinite(left_s) and not self.waits else []
        return [*([self.notice] if self.notice else []), *left]

    # Following the launcher

    def _follow(self) -> None:
        while not self._is_closed.wait(RECEIVE_EVERY_S):
            self._receive()
            if self.launched.is_over:
                self._end()
                return
            if self.ready_s == float("inf"):
                self._look_whether_ready()

    def _look_whether_ready(self) -> None:
        with self._lock:
            has_begun = self.processes.have_begun()
            states = {self._state(rank) for rank in range(self.world_size)}
        if has_begun and not self._have_begun:
            self._have_begun = True
            self.launched.ranks_have_begun()
        if states == {"idle"}:
            self.ready_s = time.monotonic()

    def _receive(self) -> None:
        for event in self.launched.take_news():
            if not isinstance(event, job_events.Notice):
                continue
            begins_to_wait = event.queued and not self.waits
            self.notice, self.waits = event.text, event.queued
            with self._lock:
                engine = self._engine
                lost = begins_to_wait and any(process.number >= 0 for process in self.processes.now())
            if lost:
                self.ready_s = float("inf")
                ended = self.launched.interruption()
                self.lose(range(self.world_size), ended.headline)
                if engine is not None:
                    engine.end_with(ended)
            elif engine is not None:
                engine.emit(event)

    def _end(self) -> None:
        """Have it known that the launcher has done with the ranks, and why."""
        with self._lock:
            processes, engine = self.processes.now(), self._engine
        never = [rank for rank, process in enumerate(processes) if process.number < 0]
        seen = RanksSeen({}, never, set(range(self.world_size)) - set(never))
        ended = self.launched.ending(seen) or job_events.JobEnded(-1, f"the {self.kind} job has ended", "", "session")
        why = f"{ended.headline}. {ended.cause}".strip()
        if self.directory.was_asked_to("idle"):
            why = f"nothing had run on them for {self.directory.about()['session']['idle_s']:g} s (idle_s)"
            ended = job_events.JobEnded(-1, f"the ranks are gone: {why}", "", "session")
        elif is_missing(self.directory.path):
            ended = folder_gone(self.directory.path, "session")
            why = ended.headline
        elif self.directory.was_asked_to("leave"):
            why = "they were closed"
            ended = job_events.JobEnded(-1, f"the ranks are gone: {why}", "", "session")
        elif dead := self.processes.dead_before_ready():
            why = dead
            ended = job_events.JobEnded(-1, dead, ended.headline, "session")
        if engine is not None:
            engine.end_with(ended)
            engine.closed.wait(KILL_S)
        if not self._is_closed.is_set():
            self._when_over(why)

    @property
    def is_over(self) -> bool:
        """Whether the launcher has done with the ranks."""
        return self.launched.is_over

    def let_go(self) -> None:
        """Take notice that nobody here has the session any more: it goes on without its notebook where it can."""
        if self.outlives_notebook:
            self._is_closed.set()
            self.launched.close()
        else:
            self.close()

    def close(self) -> None:
        """End the ranks and the launcher's job."""
        with self._lock:
            if self._is_closed.is_set():
                return
            self._is_closed.set()
        if not self.launched.is_over and not self._leave():
            self.launched.end_now()
        self.launched.close()

    def _leave(self) -> bool:
        """Have the ranks leave, which ends the launcher's job; return whether they have."""
        if self.waits or self.processes.have_ended():
            return False  # nobody is there to receive it, but others may come
        with contextlib.suppress(OSError):
            self.directory.ask("leave")
        deadline = time.monotonic() + LEAVE_S
        while time.monotonic() < deadline:
            if self.launched.is_over or self.processes.have_ended():
                return True
            time.sleep(0.02)
        return False
