"""The ranks of a session under SLURM or torchrun, and the engines that carry one job on them.

One job of the launcher stays; its guards (`engines.guard`) keep the ranks' processes, and replace those that end. Words
and jobs travel through the session's folder (`engines.folder`), so that the session outlives the notebook wherever the
launcher's job does, and `labkit.attach` finds it again.
"""

from __future__ import annotations

import contextlib
import json
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from labkit.cluster.directory_engine import FolderEngine
from labkit.cluster.run_directory import RunFolder
from labkit.cluster.supervisor import has_exit
from labkit.monitor.diagnosis import exit_in_words
from labkit.monitor.stacks import rank_list
from labkit.protocol import events
from labkit.protocol.job import Job
from labkit.rank.isolation import Modules
from labkit.session.local import Replaced, ReservedRank, replaced_in_words

HEAR_EVERY_S = 0.1
"""Time between two looks at what the launcher says."""

FAILURE_GRACE_S = 2.0
"""How long the other ranks may still report after the first has failed: what they write may be seen late."""

KILL_S = 10.0
"""How long a rank may take to be ended by its guard; then its node counts as lost."""

OUTSIDE_S = 30.0
"""How long the launcher may take to say why it has ended a rank."""

LEAVE_S = 5.0
"""How long the ranks may take to leave before the launcher is told to end them."""

Hold = Callable[["JobEngine"], None]
"""Takes the ranks for an engine; raises RuntimeError if another has them."""

Release = Callable[["JobEngine"], None]


class _Process(NamedTuple):
    """What is known of one process of a rank."""

    number: int
    """Of all that the rank has had, from 0; −1 if it has none yet."""
    pid: int = 0
    node: str = ""
    is_ready: bool = False
    exit_code: int | None = None
    was_ended: bool = False
    """Whether it was ended from outside: with its run, or by the launcher."""


class ClusterReserve:
    """Ranks that SLURM or torchrun has started. The guard of one that has ended starts a new process in its place.

    Guarantees: a process that has ended, or whose node was taken away, is known by its number, which no other process
    of that rank has. That one job at a time is on the ranks is the session's to see to.
    """

    is_here = False
    minds_idleness = True
    """The first rank's guard does, also when there is no notebook."""

    def __init__(self, carrier: FolderEngine, told: list[int]) -> None:
        self.world_size, self.folder = carrier.world_size, carrier.folder
        self.kind, self.outlives_notebook = carrier.kind, carrier.outlives_notebook
        self._carrier = carrier
        self._lock = threading.RLock()
        self._told = told
        """The number of each rank's process that the session knows of."""
        self._least = [0] * self.world_size
        """Processes with lesser numbers are gone, whether they could say so or not."""
        self._why_new = ""
        """Why all ranks are new, if they are."""
        self._since: list[str] = [""] * self.world_size
        self._processes = [_Process(-1)] * self.world_size
        self._notice, self.waits = "", False
        """What the launcher says, and whether it has no machines for the ranks just now."""
        self._have_begun = False
        self._ready_s = float("inf")
        self._engine: JobEngine | None = None
        self._newest = 0
        """The last job that this notebook knows of."""
        self._is_closed = threading.Event()
        self._when_over: Callable[[str], None] = lambda why: None

    @classmethod
    def start(cls, on: Any, session: dict[str, Any]) -> ClusterReserve:
        """Submit the job of a session; `session` is kept in its folder, for `labkit.attach`."""
        carrier = on.engine("session", None)
        carrier.about |= {"session": session}
        carrier.start(None)
        reserve = cls(carrier, [0] * carrier.world_size)
        reserve._begin()
        return reserve

    @classmethod
    def attach(cls, folder: RunFolder, about: dict[str, Any]) -> ClusterReserve:
        """Return the ranks of a session that goes on."""
        from labkit.cluster.slurm import SlurmEngine

        carrier = SlurmEngine(about["world_size"], folder, about)
        newest = folder.newest_job()
        told = folder.of_job(newest).about()["processes"] if newest else [0] * carrier.world_size
        carrier.follow(about["job"])
        reserve = cls(carrier, told)
        reserve.waits = True  # that it waits is no loss of machines
        carrier.wait_until_known()
        reserve._begin()
        return reserve

    def _begin(self) -> None:
        self._hear()
        threading.Thread(target=self._follow, name="labkit-session", daemon=True).start()

    def when_over(self, call: Callable[[str], None]) -> None:
        """Have something called with the reason once the launcher has ended the ranks for good."""
        self._when_over = call

    # What the session does with the ranks

    def engine(self, world_size: int, hold: Hold, release: Release, about: dict[str, Any]) -> JobEngine:
        """Return what carries one launched function on the first `world_size` ranks."""
        return JobEngine(self, range(world_size), world_size, hold, release, about)

    def cell_engine(self, only: Sequence[int], hold: Hold, release: Release, about: dict[str, Any]) -> JobEngine:
        """Return what carries one cell."""
        return CellEngine(self, only, self.world_size, hold, release, about)

    def new_group_store(self) -> None:
        """Return nothing: rank 0 opens the store through which ranks join a group."""

    def ask(self, word: str) -> None:
        """Say a word to every guard."""
        self.folder.ask(word)

    def take(self, engine: JobEngine) -> None:
        """Have what the launcher says told to a job, too."""
        with self._lock:
            if self._is_closed.is_set():
                raise RuntimeError("these ranks are closed; make a new labkit.Session")
            self._engine, self._newest = engine, engine.number

    @property
    def were_used_elsewhere(self) -> bool:
        """Whether another notebook has used the ranks since this one did."""
        return self.folder.newest_job() != self._newest

    def give_back(self, engine: JobEngine) -> None:
        """Take the ranks back from a job."""
        with self._lock:
            if self._engine is engine:
                self._engine = None

    def look(self) -> None:
        """Ask the launcher at once how the ranks are."""
        self._carrier.look()

    def at_work(self, number: int) -> list[int]:
        """Return the ranks that still have to do their part in a job, and that were not given up."""
        folder, given_up = self.folder.of_job(number), self.given_up(number)
        only = folder.about()["only"]
        if f"job:{number}:{_listed(only)}" not in self.folder.asked.read_text().split():
            return []  # its notebook ended before it could give it to them
        return [rank for rank in only if rank not in given_up and not has_exit(folder.file(rank, 0, "records"))]

    def given_up(self, number: int) -> set[int]:
        """Return the ranks that were to be ended while they were at a job."""
        words = (word.split(":") for word in self.folder.asked.read_text().split())
        found = (rest[1] for kind, *rest in words if kind == "kill" and rest[0] == str(number))
        return {int(rank) for ranks in found for rank in ranks.split(",")}

    def pick_up(self, number: int, hold: Hold, release: Release) -> JobEngine:
        """Return what carries a job that was begun before, perhaps by another notebook."""
        about = self.folder.of_job(number).about()
        return JobEngine(self, about["only"], about["world_size"], hold, release, about, number)

    @property
    def notice(self) -> str:
        """What the launcher says of the ranks."""
        return self._notice

    # Which process a rank is

    @property
    def incarnations(self) -> list[int]:
        """The number of each rank's process; of one that has ended, its successor's."""
        with self._lock:
            self._read()
            return [self._number(rank) for rank in range(self.world_size)]

    def has(self, rank: int, incarnation: int) -> bool:
        """Whether a rank's process is still this one."""
        return self.incarnations[rank] == incarnation

    def _number(self, rank: int) -> int:
        process = self._processes[rank]
        return max(self._least[rank], process.number + (process.exit_code is not None))

    def _read(self) -> None:
        """Look at what each rank's guard has written of its processes."""
        numbers = [-1] * self.world_size
        with contextlib.suppress(OSError):
            for file in self.folder.ranks.glob("*.records"):
                whose, count, _ = file.name.split(".")
                numbers[int(whose)] = max(numbers[int(whose)], int(count))
        for rank, number in enumerate(numbers):
            known = self._processes[rank]
            if number >= 0 and (number > known.number or known.exit_code is None):
                self._processes[rank] = _read_process(self.folder, rank, number)

    def exit_code(self, rank: int) -> int:
        """Return how the process of a rank ended that was the last to end there."""
        with self._lock:
            self._read()
            last = self._processes[rank]
            if last.exit_code is None and last.number > 0:
                last = _read_process(self.folder, rank, last.number - 1)
            return -9 if last.exit_code is None else last.exit_code

    def replace(self) -> None:
        """Do nothing: the guards do it."""

    def take_replaced(self) -> list[Replaced]:
        """Return the ranks that are new since this was last called."""
        found = []
        with self._lock:
            for rank, number in enumerate(self.incarnations):
                if number == self._told[rank]:
                    continue
                before = self._processes[rank]
                if before.number == number:
                    before = _read_process(self.folder, rank, number - 1)
                how = self._why_new
                if not how and not before.was_ended and before.exit_code is not None:
                    how = exit_in_words(before.exit_code)
                self._told[rank] = number
                self._since[rank] = f"new since {time.strftime('%H:%M:%S')}" + (f", after {how}" if how else "")
                found.append(Replaced(rank, how))
            self._why_new = ""
        return found

    def lose(self, ranks: Sequence[int], why: str) -> None:
        """Count the processes of ranks as gone, though nobody has seen them end."""
        with self._lock:
            self._read()
            self._why_new = why
            for rank in ranks:
                self._least[rank] = max(self._least[rank], self._processes[rank].number + 1)

    # What is known of them

    @property
    def pids(self) -> list[int]:
        """Process ids by rank, each on its node; none once they are gone."""
        with self._lock:
            self._read()
            return [] if self._is_closed.is_set() else [process.pid for process in self._processes]

    def node(self, rank: int) -> str:
        """Return the node of a rank; "" if it has none yet."""
        return self._processes[rank].node

    def ranks(self) -> list[ReservedRank]:
        """Return what is known of each rank."""
        if self._is_closed.is_set():
            return []
        with self._lock:
            self._read()
            return [
                ReservedRank(rank, self._state(rank), self._where(rank), note=self._since[rank])
                for rank in range(self.world_size)
            ]

    def _state(self, rank: int) -> str:
        process = self._processes[rank]
        if self.waits:
            return "queued"
        return "idle" if process.is_ready and self._number(rank) == process.number else "starting"

    def _where(self, rank: int) -> str:
        process = self._processes[rank]
        return f"{process.node}, process {process.pid}" if process.node and not self.waits else ""

    def notices(self) -> list[str]:
        """Return what else there is to say of the ranks: the launcher's job, and how long it may stay."""
        left_s = self._carrier.time_left_s()
        left = [f"{_duration(left_s)} left of its time limit"] if math.isfinite(left_s) and not self.waits else []
        return [*([self._notice] if self._notice else []), *left]

    @property
    def ready_s(self) -> float:
        """When all ranks had been started and were ready, as `time.monotonic()`; infinite before."""
        return self._ready_s

    # Following the launcher

    def _follow(self) -> None:
        while not self._is_closed.wait(HEAR_EVERY_S):
            self._hear()
            if self._carrier.is_over:
                self._end()
                return
            if self._ready_s == float("inf"):
                self._look_whether_ready()

    def _look_whether_ready(self) -> None:
        with self._lock:
            self._read()
            states = {self._state(rank) for rank in range(self.world_size)}
            has_begun = all(process.number >= 0 for process in self._processes)
        if has_begun and not self._have_begun:
            self._have_begun = True
            self._carrier.ranks_have_begun()
        if states == {"idle"}:
            self._ready_s = time.monotonic()

    def _hear(self) -> None:
        for event in self._carrier.news():
            if not isinstance(event, events.Notice):
                continue
            begins_to_wait = event.queued and not self.waits
            self._notice, self.waits = event.text, event.queued
            with self._lock:
                self._read()
                engine = self._engine
                lost = begins_to_wait and any(process.number >= 0 for process in self._processes)
            if lost:
                self._ready_s = float("inf")
                ended = self._carrier.interruption()
                self.lose(range(self.world_size), ended.headline)
                if engine is not None:
                    engine.end_with(ended)
            elif engine is not None:
                engine.say(event)

    def _end(self) -> None:
        """Say that the launcher has done with the ranks, and why."""
        words = self.folder.asked.read_text().split()
        with self._lock:
            self._read()
            engine, session = self._engine, self.folder.about()["session"]
        never = [rank for rank, process in enumerate(self._processes) if process.number < 0]
        ended = self._carrier.ending(never) or events.JobEnded(-1, f"the {self.kind} job has ended", "")
        why = f"{ended.headline}. {ended.cause}".strip()
        if "idle" in words:
            why = f"nothing had run on them for {session['idle_s']:g} s (idle_s)"
            ended = events.JobEnded(-1, f"the ranks are gone: {why}", "")
        elif "leave" in words:
            why = "they were closed"
            ended = events.JobEnded(-1, f"the ranks are gone: {why}", "")
        elif dead := self._dead_before_ready():
            why = dead
            ended = events.JobEnded(-1, dead, ended.headline)
        if engine is not None:
            engine.end_with(ended)
            engine.closed.wait(KILL_S)
        if not self._is_closed.is_set():
            self._when_over(why)

    def _dead_before_ready(self) -> str:
        for rank, process in enumerate(self._processes):
            if process.exit_code is not None and not process.is_ready and not process.was_ended:
                output = self.folder.file(rank, process.number, "out").read_text(errors="replace").strip()
                how = exit_in_words(process.exit_code)
                return f"rank {rank} died ({how}) before it was ready; it wrote: {output[-2000:] or 'nothing'}"
        return ""

    @property
    def is_over(self) -> bool:
        """Whether the launcher has done with the ranks."""
        return self._carrier.is_over

    def let_go(self) -> None:
        """Take notice that nobody here has the session any more: it goes on without its notebook where it can."""
        if self.outlives_notebook:
            self._is_closed.set()
            self._carrier.close()
        else:
            self.close()

    def close(self) -> None:
        """End the ranks and the launcher's job."""
        with self._lock:
            if self._is_closed.is_set():
                return
            self._is_closed.set()
        if not self._carrier.is_over and not self._leave():
            self._carrier.end_now()
        self._carrier.close()

    def _leave(self) -> bool:
        """Have the ranks leave, which ends the launcher's job; return whether they have."""
        if self.waits or self._have_left():
            return False  # nobody is there to hear it, but others may come
        with contextlib.suppress(OSError):
            self.ask("leave")
        deadline = time.monotonic() + LEAVE_S
        while time.monotonic() < deadline:
            if self._carrier.is_over or self._have_left():
                return True
            time.sleep(0.02)
        return False

    def _have_left(self) -> bool:
        with self._lock:
            self._read()
            return all(process.exit_code is not None for process in self._processes)


def _read_process(folder: RunFolder, rank: int, number: int) -> _Process:
    found = _Process(number)
    if number < 0:
        return found
    with contextlib.suppress(OSError):
        for line in folder.file(rank, number, "records").read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError):  # cut short
                kind, _, *rest = json.loads(line)
                if kind == "Process":
                    found = found._replace(pid=rest[0], node=rest[1])
                elif kind == "Ready":
                    found = found._replace(is_ready=True)
                elif kind == "Exit":
                    found = found._replace(exit_code=rest[0], was_ended=rest[2])
    return found


def _duration(seconds: float) -> str:
    seconds = max(0.0, seconds)
    if seconds >= 5400:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"


class JobEngine(FolderEngine):
    """Carries one launched function on ranks of a session, through a folder of its own in the session's."""

    kind = "session"
    failure_grace_s = FAILURE_GRACE_S

    def __init__(
        self,
        reserve: ClusterReserve,
        only: Sequence[int],
        world_size: int,
        hold: Hold,
        release: Release,
        about: dict[str, Any],
        number: int = 0,
    ) -> None:
        self.number = number or reserve.folder.newest_job() + 1
        """Of the job, among those of the session."""
        super().__init__(world_size, reserve.folder.of_job(self.number), about)
        self.outlives_notebook = reserve.outlives_notebook
        self.closed = threading.Event()
        """Set once the ranks are given back."""
        self._reserve, self._only = reserve, list(only)
        self._hold, self._release = hold, release
        self._ended_by_us: set[int] = set()
        self._awaited: set[int] = set()
        """New processes that have not begun yet."""
        self._withheld: list[events.Exit] = []
        """Of ranks that the launcher has ended, until it is known why."""
        self._patience_s = OUTSIDE_S
        self._withhold_until_s = self._no_answer_s = float("inf")
        self._ending: events.JobEnded | None = None
        self._is_told = False

    # For the run

    def start(self, job: Job | None) -> None:
        """Give the ranks the job. Returns at once; a rank whose process is new begins when it is ready."""
        assert job is not None
        self._hold(self)
        try:
            self._check_nobody_else_is_at_it()
            self._reserve.take(self)
            self._say_what_is_awaited(self._reserve.take_replaced())
            self.about |= {"only": self._only, "processes": self._reserve.incarnations}
            self.folder.create(job._replace(reserved=True, surroundings=Modules.here()), self.about)
            self._reserve.ask(f"job:{self.number}:{_listed(self._only)}")
        except BaseException:
            self._give_back()
            raise
        self._say_who_is_absent()

    def follow(self) -> None:
        """Follow a job that the ranks have been given before."""
        self._hold(self)
        self._reserve.take(self)
        self._ended_by_us = self._reserve.given_up(self.number)
        if kept := self.about.get("ended"):
            self._ending = events.JobEnded(-1, *kept)
        if not self._reserve.at_work(self.number):
            self._patience_s = 0.0  # whoever ended it has said why long ago
        self._say_who_is_absent()

    def _check_nobody_else_is_at_it(self) -> None:
        if self.number > 1 and (still := self._reserve.at_work(self.number - 1)):
            name = self._reserve.folder.of_job(self.number - 1).about()["name"]
            raise RuntimeError(
                f"run {name!r} of another notebook holds these ranks: {rank_list(still)} still at it. Wait for it, or "
                "attach to it and stop it: labkit.attach(…).last.stop()"
            )

    def _say_who_is_absent(self) -> None:
        if self._reserve.waits:
            self.say(events.Notice(-1, self._reserve.notice, queued=True))
        elif self._reserve.notice and not self._awaited:
            self.say(events.Notice(-1, self._reserve.notice))
        for rank in set(range(self.world_size)) - set(self._only):
            self._exits[rank] = events.Exit(rank, 0)
            self.say(events.Absent(rank))

    def _say_what_is_awaited(self, new: list[Replaced]) -> None:
        if mine := [each for each in new if each.rank in self._only]:
            self._awaited = {each.rank for each in mine}
            self.say(events.Notice(-1, replaced_in_words(mine) + ": the launch waits until it is ready"))

    def ask_to_stop(self) -> None:
        """Ask every rank to stop; see `worker.Stopped`."""
        self.folder.ask("stop")  # for who attaches later
        self._reserve.ask("stop")

    def ask_for_stacks(self) -> list[int]:
        """Ask every rank that has begun and not ended where it stands."""
        self._reserve.ask("stacks")
        return sorted(self._reader.begun - set(self._exits))

    def kill(self) -> None:
        """Have the ranks ended that are still at it; they are replaced."""
        still = self._still()
        if self._killed or not still:
            return
        self._killed = True
        self._ended_by_us.update(still)
        self._reserve.ask(f"kill:{self.number}:{_listed(still)}")
        # Nobody need answer for ranks that have not got their machines yet.
        self._no_answer_s = time.monotonic() + (0.0 if self._reserve.waits else KILL_S)

    def killed(self, rank: int) -> bool:
        """Whether the rank was ended from outside."""
        return rank in self._ended_by_us or (rank in self._exits and self._exits[rank].ended)

    def close(self) -> None:
        """Give the ranks back."""
        self._give_back()

    def _give_back(self) -> None:
        self._reserve.give_back(self)
        self._release(self)
        self.closed.set()

    # For the reserve

    def end_with(self, ending: events.JobEnded) -> None:
        """Take notice that the launcher has ended the ranks."""
        with self._lock:
            self._ending = ending

    def _still(self) -> list[int]:
        return [rank for rank in self._only if rank not in self._exits]

    def _new(self) -> list[events.Event]:
        with self._lock:
            found, self._news = self._news, []
            ending = self._ending
        read = self._reader.read()
        for event in read:
            if not isinstance(event, events.Exit) or event.rank in self._exits:
                if isinstance(event, events.Started) and event.rank in self._awaited:
                    self._awaited.remove(event.rank)
                    if not self._awaited:
                        found.append(events.Notice(-1, self._reserve.notice))
                found.append(event)
                continue
            self._exits[event.rank] = event
            if event.ended and event.rank not in self._ended_by_us:
                self._withheld.append(event)
                self._withhold_until_s = min(self._withhold_until_s, time.monotonic() + self._patience_s)
                self._reserve.look()
            else:
                found.append(event)
        if not read and not self._is_told:
            found += self._last_words_of(ending)
        return found

    def _last_words_of(self, ending: events.JobEnded | None) -> list[events.Event]:
        """Say how the ranks ended that cannot say so themselves, once that is known."""
        now = time.monotonic()
        missing = self._still()
        if ending is None and now > self._no_answer_s and missing and not self._reserve.waits:
            ending = self._no_answer(missing)
        elif ending is None and now < min(self._withhold_until_s, self._no_answer_s):
            return []
        if not missing and not self._withheld:
            return []
        if ending is None and not self._killed:
            who = rank_list([exit.rank for exit in self._withheld] or missing)
            cause = "Nobody here saw why. The node may have been lost or taken away, or the cluster's job ended."
            ending = events.JobEnded(-1, f"{who} ended from outside", cause)
        self._is_told = True
        if ending is not None:
            self.folder.note(self.about | {"ended": ending[1:]})
        if missing:  # whoever is started in their place is not to begin this job
            self._reserve.ask(f"kill:{self.number}:{_listed(missing)}")
        gone = [events.Exit(rank, -9, ended=True, unseen=True) for rank in missing]
        self._exits |= {exit.rank: exit for exit in gone}
        return [*([ending] if ending else []), *self._withheld, *gone]

    def _no_answer(self, missing: list[int]) -> events.JobEnded:
        """Say that nobody answers for some ranks, whose nodes then count as lost."""
        nodes = ", ".join(dict.fromkeys(self._reserve.node(rank) or "a node not known yet" for rank in missing))
        headline = f"{nodes}, where {rank_list(missing)} ran, does not answer"
        self._reserve.lose(missing, f"{nodes} did not answer")
        self._reserve.look()
        return events.JobEnded(
            -1,
            headline,
            f"The ranks there were to be ended, and what minds them has not done so within {KILL_S:g} s. The node may "
            "have crashed or lost its connection; the cluster finds out by itself. Launch again once it has.",
        )


class CellEngine(JobEngine):
    """Carries one cell on some of a session's ranks, in the process group that stays from cell to cell."""

    failure_grace_s = float("inf")  # the session's to decide: who is not stuck keeps its variables
    group_store: Any = None
    """None: rank 0 keeps it."""

    def start(self, job: Job | None) -> None:
        """Send the cell to those that have a part in it; say so if they wait for machines."""
        super().start(job)
        if self._reserve.waits:
            print(f"the ranks wait for machines: {self._reserve.notice}", flush=True)


def _listed(ranks: Sequence[int]) -> str:
    return ",".join(map(str, ranks))
