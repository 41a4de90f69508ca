"""The ranks of a session under SLURM, torchrun or Ray, and the engines that carry one job on them.

One job of the launcher stays; its supervisors (`session.supervisor`) keep the ranks' processes, and replace those that
end. Words and jobs travel through the session's directory, so that the session outlives the notebook wherever the
launcher's job does, and `labkit.attach` finds it again.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from labkit.failures.grouping import rank_list
from labkit.launchers import job_events
from labkit.launchers.directory_engine import DirectoryEngine, folder_gone
from labkit.launchers.launcher_job import LauncherJob, RanksSeen
from labkit.launchers.old_slurm.job import SlurmJob
from labkit.launchers.run_directory.files import is_missing
from labkit.protocol import events
from labkit.protocol.job import Job, Surroundings
from labkit.protocol.pages import help_hint
from labkit.session.directory import SessionDirectory
from labkit.session.processes import Processes
from labkit.session.ranks import Replaced, ReservedRank, duration, replaced_in_words
from labkit.session.turns import Turn
from labkit.system import host

SUPERVISOR = Path(__file__).with_name("supervisor.py")

RECEIVE_EVERY_S = 0.1
"""Time between two looks at what the launcher says."""

LEAVE_S = 5.0
"""How long the ranks may take to leave before the launcher is told to end them."""

KILL_S = 10.0
"""How long a rank may take to be ended by its supervisor; then its node counts as lost."""

FAILURE_GRACE_S = 2.0
"""How long the other ranks may still report after the first has failed: what they write may be seen late."""

OUTSIDE_S = 30.0
"""How long the launcher may take to say why it has ended a rank."""


class ClusterReserve(Processes):
    """Ranks that a launcher has started. The supervisor of one that has ended starts a new process in its place.

    That one job at a time is on the ranks is the session's to see to.
    """

    is_here = False
    handles_idleness = True
    """The first rank's supervisor does, also when there is no notebook."""

    def __init__(self, launched: LauncherJob, known: list[int]) -> None:
        super().__init__(SessionDirectory(launched.directory.path), known)
        self.launched, self.world_size = launched, launched.world_size
        self.notice, self.waits = "", False
        """What the launcher says, and whether it has no machines for the ranks just now."""
        self._have_begun = False
        self.ready_s = float("inf")
        """When all ranks had been started and were ready, as `time.monotonic()`; infinite before."""
        self._engine: JobEngine | None = None
        self._newest_job = 0
        """The last job that this notebook knows of."""
        self._is_closed = threading.Event()
        self._when_over: Callable[[str], None] = lambda why: None

    @classmethod
    def start(cls, on: Any, session: dict[str, Any]) -> ClusterReserve:
        """Submit the job of a session; `session` is kept in its directory, for `labkit.attach`."""
        launched: LauncherJob = on.job("session", None)
        launched.supervisor = SUPERVISOR
        launched.about |= {"session": session}
        launched.start(SessionDirectory(launched.directory.path).create_for_jobs)
        try:
            reserve = cls(launched, [0] * launched.world_size)
            reserve.begin()
        except BaseException:  # interrupted: nobody would know of the job
            launched.end_now()
            launched.close()
            raise
        return reserve

    @classmethod
    def attach(cls, path: Path, about: dict[str, Any]) -> ClusterReserve:
        """Return the ranks of a session that goes on."""
        directory = SessionDirectory(path)
        launched = SlurmJob(about["world_size"], directory, about)
        newest = directory.newest_job()
        known = directory.of_job(newest).about()["processes"] if newest else [0] * launched.world_size
        launched.follow(about["job"])
        reserve = cls(launched, known)
        reserve.waits = True  # that it waits is no loss of machines
        launched.wait_until_known()
        reserve.begin()
        return reserve

    def engine(self, world_size: int, turn: Turn, about: dict[str, Any]) -> JobEngine:
        """Return what carries one launched function on the first `world_size` ranks."""
        return JobEngine(self, range(world_size), world_size, turn, about)

    def cell_engine(self, only: Sequence[int], turn: Turn, about: dict[str, Any]) -> JobEngine:
        """Return what carries one cell."""
        return CellEngine(self, only, self.world_size, turn, about)

    def pick_up(self, number: int, turn: Turn) -> JobEngine:
        """Return what carries a job that was begun before, perhaps by another notebook."""
        about = self.directory.of_job(number).about()
        return JobEngine(self, about["only"], about["world_size"], turn, about, number)

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

    def take(self, engine: JobEngine) -> None:
        """Have what the launcher says told to a job, too. Raises RuntimeError if the ranks are closed."""
        with self._lock:
            if self._is_closed.is_set():
                raise RuntimeError(f"these ranks are closed; make a new labkit.Session\n{help_hint('session')}")
            self._engine, self._newest_job = engine, engine.number

    def give_back(self, engine: JobEngine) -> None:
        """Take the ranks back from a job."""
        with self._lock:
            if self._engine is engine:
                self._engine = None

    @property
    def were_used_elsewhere(self) -> bool:
        """Whether another notebook has used the ranks since this one did."""
        return self.directory.newest_job() != self._newest_job

    # Which process a rank is

    def has(self, rank: int, incarnation: int) -> bool:
        """Whether a rank's process is still this one."""
        return self.incarnations[rank] == incarnation

    def replace(self) -> None:
        """Do nothing: the supervisors do it."""

    @property
    def pids(self) -> list[int]:
        """Process ids by rank, each on its node; none once they are gone."""
        return [] if self._is_closed.is_set() else [process.pid for process in self.now()]

    @property
    def pids_here(self) -> dict[int, int]:
        """Process ids, by rank, of those that are on this machine."""
        here = host.node()
        now = [] if self._is_closed.is_set() else self.now()
        return {rank: process.pid for rank, process in enumerate(now) if process.node == here}

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
                    note=self.notes[rank],
                )
                for rank, process in enumerate(self.now())
            ]

    def _state(self, rank: int) -> str:
        if self.waits:
            return "queued"
        return "idle" if self.is_idle(rank) else "starting"

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
            has_begun = self.have_begun()
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
                lost = begins_to_wait and any(process.number >= 0 for process in self.now())
            if lost:
                self.ready_s = float("inf")
                ended = self.launched.interruption()
                self.lose(range(self.world_size), ended.headline)
                if engine is not None:
                    engine.ending = ended
            elif engine is not None:
                engine.emit(event)

    def _end(self) -> None:
        """Have it known that the launcher has done with the ranks, and why."""
        with self._lock:
            processes, engine = self.now(), self._engine
        never = [rank for rank, process in enumerate(processes) if process.number < 0]
        seen = RanksSeen({}, never, set(range(self.world_size)) - set(never))
        ended = self.launched.ending(seen) or job_events.JobEnded(
            -1, f"the {self.launched.kind} job has ended", "", "session"
        )
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
        elif dead := self.dead_before_ready():
            why = dead
            ended = job_events.JobEnded(-1, dead, ended.headline, "session")
        if engine is not None:
            engine.ending = ended
            engine.closed.wait(KILL_S)
        if not self._is_closed.is_set():
            self._when_over(why)

    def let_go(self) -> None:
        """Take notice that nobody here has the session any more: it goes on without its notebook where it can."""
        if self.launched.outlives_notebook:
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
        if self.waits or self.have_ended():
            return False  # nobody is there to receive it, but others may come
        with contextlib.suppress(OSError):
            self.directory.ask("leave")
        deadline = time.monotonic() + LEAVE_S
        while time.monotonic() < deadline:
            if self.launched.is_over or self.have_ended():
                return True
            time.sleep(0.02)
        return False


class JobEngine(DirectoryEngine):
    """Carries one launched function.

    A rank ends in one of four ways, of which only the first two are final when they are read: it did its part; it was
    ended with its run; the launcher ended it, or had it stop, and may say why, which is waited for (`_withheld`); or
    nothing is heard of it any more.
    """

    failure_grace_s = FAILURE_GRACE_S

    def __init__(
        self,
        reserve: ClusterReserve,
        only: Sequence[int],
        world_size: int,
        turn: Turn,
        about: dict[str, Any],
        number: int = 0,
    ) -> None:
        self.number = number or reserve.directory.newest_job() + 1
        """Of the job, among those of the session."""
        super().__init__(world_size, reserve.directory.of_job(self.number), reserve.directory)
        self.about = {"launcher": "session", "world_size": world_size, **about}
        """What is kept in the job's directory."""
        self.outlives_notebook = reserve.launched.outlives_notebook
        self._reserve, self._only, self._turn = reserve, list(only), turn
        self._is_given = self._is_killed = False
        self._ended_by_us: set[int] = set()
        self._awaited: set[int] = set()
        """New processes that have not begun yet."""
        self._withheld: list[events.Exit] = []
        """Of ranks that the launcher has ended, until it is known why."""
        self._patience_s = OUTSIDE_S
        self._withhold_until_s = self._no_answer_s = float("inf")
        self._is_told = False
        self.ending: job_events.JobEnded | None = None
        """Why the launcher has ended the ranks, if it has."""
        self.closed = threading.Event()
        """Set once the ranks are given back."""

    # For the run

    def start(self, job: Job) -> None:
        """Give the ranks the job. Returns at once; a rank whose process is new begins when it is ready."""
        self._turn.take(self)
        try:
            self._check_nobody_else_is_at_it()
            self._reserve.take(self)
            self._emit_what_is_awaited(self._reserve.take_replaced())
            self.about |= {"only": self._only, "processes": self._reserve.incarnations}
            self.directory.create(job._replace(stays=Surroundings(os.getcwd())), self.about)
            self._is_given = True
            self._reserve.directory.give_job(self.number, self._only)
            self._emit_who_is_absent()
        except BaseException:
            self.kill()  # interrupted, perhaps when the ranks had it: nobody would follow them
            self.close()
            raise

    def follow(self) -> None:
        """Follow a job that the ranks have been given before."""
        self._turn.take(self)
        self._reserve.take(self)
        self._is_given = True
        self._ended_by_us = self._reserve.directory.given_up(self.number)
        if kept := self.about.get("ended"):
            self.ending = job_events.JobEnded(-1, *kept)
        if not self._reserve.directory.at_work(self.number):
            self._patience_s = 0.0  # whoever ended it has said why long ago
        self._emit_who_is_absent()

    def _check_nobody_else_is_at_it(self) -> None:
        sessions = self._reserve.directory
        if self.number > 1 and (still := sessions.at_work(self.number - 1)):
            name = sessions.of_job(self.number - 1).about()["name"]
            raise RuntimeError(
                f"run {name!r} of another notebook holds these ranks: {rank_list(still)} still at it. Wait for it, or "
                f"attach to it and stop it: labkit.attach(…).last.stop()\n{help_hint('session')}"
            )

    def _emit_who_is_absent(self) -> None:
        if self._reserve.waits:
            self.emit(job_events.Notice(-1, self._reserve.notice, queued=True))
        elif self._reserve.notice and not self._awaited:
            self.emit(job_events.Notice(-1, self._reserve.notice))
        for rank in set(range(self.world_size)) - set(self._only):
            self._exits[rank] = events.Exit(rank, 0)
            self.emit(job_events.Absent(rank))

    def _emit_what_is_awaited(self, new: list[Replaced]) -> None:
        if mine := [each for each in new if each.rank in self._only]:
            self._awaited = {each.rank for each in mine}
            self.emit(job_events.Notice(-1, replaced_in_words(mine) + ": the launch waits until it is ready"))

    def ask_to_stop(self) -> None:
        """Ask every rank to stop; see `worker.Stopped`."""
        self._knows_who_stopped = True  # before anybody can read who it was
        with contextlib.suppress(OSError):
            self.directory.ask("stop")  # for who attaches later
        super().ask_to_stop()

    def kill(self) -> None:
        """Have the ranks ended that are still at it; they are replaced."""
        still = self._still()
        if self._is_killed or not (still and self._is_given):
            return
        self._ended_by_us.update(still)
        try:
            self._reserve.directory.kill_job(self.number, still)
        except OSError as error:  # tried again when the run asks again
            self.emit(
                job_events.Notice(
                    -1, f"{rank_list(still)} could not be told to end: {error}. session.close() ends them"
                )
            )
            return
        self._is_killed = True
        # Nobody need answer for ranks that have not got their machines yet.
        self._no_answer_s = time.monotonic() + (0.0 if self._reserve.waits else KILL_S)

    def killed(self, rank: int) -> bool:
        """Whether the rank was ended from outside."""
        return rank in self._ended_by_us or (rank in self._exits and self._exits[rank].ended)

    def close(self) -> None:
        """Give the ranks back."""
        self._reserve.give_back(self)
        self._turn.give_back(self)
        self.closed.set()

    def _still(self) -> list[int]:
        return [rank for rank in self._only if rank not in self._exits]

    def _new(self) -> list[events.Event]:
        found = super()._new()
        ending = self.ending  # before the look: what ranks wrote until then is seen by it
        read = self._reader.read()
        for event in read:
            if isinstance(event, events.Exit) and event.rank not in self._exits:
                found += self._take_exit(event)
                continue
            if isinstance(event, events.Started) and event.rank in self._awaited:
                self._awaited.remove(event.rank)
                if not self._awaited:
                    found.append(job_events.Notice(-1, self._reserve.notice))
            found.append(event)
        if self._reader.is_gone and ending is None:
            self.ending = ending = folder_gone(self.directory.path)
            self.kill()
        if not read and not self._reader.is_behind and not self._is_told:
            found += self._last_events(ending)
        return found

    def _take_exit(self, event: events.Exit) -> list[events.Event]:
        if event.rank in self._reader.interrupted:  # it has stopped because the launcher takes its machine away
            event = event._replace(ended=True)
        self._exits[event.rank] = event
        if not event.ended or event.rank in self._ended_by_us:
            return [event]
        self._withheld.append(event)
        self._withhold_until_s = min(self._withhold_until_s, time.monotonic() + self._patience_s)
        self._reserve.launched.look()
        return []

    def _last_events(self, ending: job_events.JobEnded | None) -> list[events.Event]:
        """Return how the ranks ended that cannot tell it themselves, once that is known."""
        now = time.monotonic()
        missing = self._still()
        if ending is None and now > self._no_answer_s and missing and not self._reserve.waits:
            ending = self._no_answer(missing)
        elif ending is None and now < min(self._withhold_until_s, self._no_answer_s):
            return []
        if not missing and not self._withheld:
            return []
        if ending is None and not self._is_killed:
            who = rank_list([exit.rank for exit in self._withheld] or missing)
            cause = "Nobody here saw why. Perhaps the node was lost or taken away, or the cluster's job ended."
            ending = job_events.JobEnded(-1, f"{who} ended from outside", cause, "session")
        self._is_told = True
        with contextlib.suppress(OSError):  # a full disk, say: only who attaches later would read it
            if ending is not None:
                self.directory.note(self.about | {"ended": (ending.headline, ending.cause, ending.page)})
            if missing:  # whoever is started in their place is not to begin this job
                self._reserve.directory.kill_job(self.number, missing)
        gone = [events.Exit(rank, -9, ended=True, unseen=True) for rank in missing]
        self._exits |= {exit.rank: exit for exit in gone}
        return [*([ending] if ending else []), *self._withheld, *gone]

    def _no_answer(self, missing: list[int]) -> job_events.JobEnded:
        """Say that nobody answers for some ranks, whose nodes then count as lost."""
        nodes = ", ".join(dict.fromkeys(self._reserve.node(rank) or "a node not known yet" for rank in missing))
        self._reserve.lose(missing, f"{nodes} did not answer")
        self._reserve.launched.look()
        return job_events.JobEnded(
            -1,
            f"{nodes}, where {rank_list(missing)} ran, does not answer",
            f"The ranks there were to be ended, and their supervisors have not done so within {KILL_S:g} s. "
            "Perhaps the node has crashed or lost its connection; the cluster finds out by itself. Launch again then.",
            page="session",
        )


class CellEngine(JobEngine):
    """Carries one cell on some of a session's ranks, in the process group that stays from cell to cell."""

    failure_grace_s = float("inf")  # the session's to decide: who is not stuck keeps its variables
    rendezvous: None = None
    """Rank 0 makes it."""

    def start(self, job: Job) -> None:
        """Send the cell to those that have a part in it; say so if they wait for machines."""
        super().start(job)
        if self._reserve.waits:
            print(f"the ranks wait for machines: {self._reserve.notice}", flush=True)
