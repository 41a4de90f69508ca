"""The ranks of a session as processes of this machine, and the engines that carry one job on them."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Sequence

from labkit.engines import standby
from labkit.engines.listener import read
from labkit.engines.local import LocalEngine
from labkit.engines.rendezvous import LocalRendezvous
from labkit.engines.spawn import RankProcess, spawn
from labkit.failures.exit_codes import in_words
from labkit.launchers import job_events
from labkit.protocol import events
from labkit.protocol.job import Job, Surroundings
from labkit.protocol.pages import help_hint
from labkit.session.ranks import Replaced, ReservedRank, replaced_in_words
from labkit.session.turns import Turn

LEAVE_S = 1.0
"""How long a process may take to end when it is told to leave."""


class Reserve:
    """Processes of this machine, one for each rank of a session. One that has ended is replaced by a new one.

    Guarantees: a process that has ended is found before the next job, and it alone is replaced; a caller that takes the
    processes waits for a replacement that is being started, but not for what it imports. That one job at a time is on
    them is the session's to see to.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._lock = threading.RLock()
        self.processes = _new_processes(world_size)
        self.replaced: list[Replaced] = []
        """Ranks that are new, and that nobody has been told of."""
        self._exit_codes: dict[int, int] = {}
        self._ended_with_a_run: set[int] = set()
        self._is_closed = False

    def take(self, count: int) -> list[RankProcess]:
        """Return the processes of the first `count` ranks, alive; those that had ended are replaced first."""
        with self._lock:
            self._check_open()
            self.replace()
            return self.processes[:count]

    def restart(self) -> None:
        """Start a new process for every rank, and end those of before."""
        with self._lock:
            self._check_open()
            before, self.processes = self.processes, _new_processes(self.world_size)
            self.replaced.clear()
            self._ended_with_a_run.clear()
        _end(before)

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError(f"these ranks are closed; make a new labkit.Session\n{help_hint('session')}")

    def dead(self) -> list[int]:
        """Return the ranks whose processes have ended."""
        with self._lock:
            return [rank for rank, process in enumerate(self.processes) if not process.is_alive]

    def has(self, rank: int, pid: int) -> bool:
        """Whether a rank's process is still this one."""
        with self._lock:
            process = self.processes[rank]
            return process.pid == pid and process.is_alive

    def exit_code(self, rank: int) -> int:
        """Return how the process of a rank ended that was the last to end there."""
        with self._lock:
            process = self.processes[rank]
            return self._exit_codes[rank] if process.is_alive else process.wait_for_exit()

    def ended_with_a_run(self, rank: int) -> None:
        """Note that a process is being ended because its run was."""
        self._ended_with_a_run.add(rank)

    def replace(self) -> None:
        """Start new processes in the place of those that have ended."""
        with self._lock:
            if self._is_closed or not (dead := self.dead()):
                return
            for rank, new in zip(dead, spawn(len(dead)), strict=True):
                self._exit_codes[rank] = self.processes[rank].wait_for_exit()
                how = "" if rank in self._ended_with_a_run else in_words(self._exit_codes[rank])
                self.processes[rank].close()
                self.processes[rank] = new
                self.replaced.append(Replaced(rank, how))
            self._ended_with_a_run.clear()

    def replace_soon(self) -> None:
        """Start replacements without making anybody wait."""
        if self.dead():
            threading.Thread(target=self._replace_quietly, name="labkit-replace", daemon=True).start()

    def _replace_quietly(self) -> None:
        with contextlib.suppress(
            RuntimeError, OSError
        ):  # at the kernel's end; else the next job tries again and says so
            self.replace()

    def take_replaced(self) -> list[Replaced]:
        """Return the ranks that are new since this was last called."""
        with self._lock:
            replaced, self.replaced = self.replaced, []
            return replaced

    def close(self) -> None:
        """End the processes; those that have nothing to do may end by themselves."""
        with self._lock:
            self._is_closed = True
            processes, self.processes = self.processes, []
        _end(processes)

    @property
    def pids(self) -> list[int]:
        """Process ids by rank."""
        with self._lock:
            return [process.pid for process in self.processes]

    def ranks(self) -> list[ReservedRank]:
        """Return what is known of each rank."""
        with self._lock:
            return [
                ReservedRank(
                    rank,
                    "ended" if not process.is_alive else "idle" if process.is_ready else "starting",
                    f"process {process.pid}",
                )
                for rank, process in enumerate(self.processes)
            ]


class ReservedEngine(LocalEngine):
    """Carries one launched function on reserved ranks."""

    def __init__(self, reserve: Reserve, world_size: int, turn: Turn) -> None:
        super().__init__(world_size)
        self._reserve, self._turn = reserve, turn
        self._awaited: set[int] = set()
        """New processes that have not begun yet."""

    def start(self, job: Job) -> None:
        """Send each rank the job. Returns at once; a rank whose process is new begins when it is ready."""
        super().start(job._replace(stays=Surroundings(os.getcwd(), dict(os.environ))))
        if new := [each for each in self._reserve.take_replaced() if each.rank < self.world_size]:
            self._awaited = {each.rank for each in new}
            self._events.put(job_events.Notice(-1, replaced_in_words(new) + ": the launch waits until it is ready"))

    def poll(self, timeout_s: float) -> list[events.Event]:
        """Return the records that have arrived, waiting at most `timeout_s` for the first."""
        arrived = super().poll(timeout_s)
        if self._awaited:
            self._awaited -= {event.rank for event in arrived if isinstance(event, events.Started)}
            if not self._awaited:
                arrived.append(job_events.Notice(-1, ""))
        return arrived

    def kill(self) -> None:
        """End the ranks that are still at it; they are replaced."""
        before = set(self._killed)
        super().kill()
        for rank in self._killed - before:
            self._reserve.ended_with_a_run(rank)

    def _take(self) -> list[RankProcess]:
        self._turn.take(self)
        standby.begun()
        try:
            ranks = self._reserve.take(self.world_size)
        except BaseException:
            standby.done(0)
            self._turn.give_back(self)
            raise
        for process in ranks:
            _forget_output(process)
        return ranks

    def _give_back(self, ranks: list[RankProcess]) -> None:
        standby.done(0)
        self._reserve.replace_soon()
        self._turn.give_back(self)


class CellEngine(ReservedEngine):
    """Carries one cell on some of a session's ranks, in the process group that stays from cell to cell."""

    failure_grace_s = float("inf")  # the session's to decide: who is not stuck keeps its variables

    def __init__(self, reserve: Reserve, only: Sequence[int], turn: Turn, rendezvous: LocalRendezvous | None) -> None:
        super().__init__(reserve, reserve.world_size, turn)
        self._only = set(only)
        self._groups_rendezvous = rendezvous
        """Where the group is joined; the session's own."""

    def start(self, job: Job) -> None:
        """Send the cell to those that have a part in it."""
        for rank in set(range(self.world_size)) - self._only:
            self._done.add(rank)
            self._events.put(job_events.Absent(rank))
        super().start(job)

    def _new_rendezvous(self) -> LocalRendezvous:
        assert self._groups_rendezvous is not None
        return self._groups_rendezvous

    def _close_rendezvous(self) -> None:
        """Leave it to the session."""


def _new_processes(count: int) -> list[RankProcess]:
    new = standby.take(count)
    standby.done(0)
    return new


def _end(processes: Sequence[RankProcess]) -> None:
    """End processes; those that have nothing to do may end by themselves."""
    try:
        for process in processes:
            process.send("leave")  # once it has done what it has been given
        deadline = time.monotonic() + LEAVE_S
        for process in processes:
            process.process.join(max(0.0, deadline - time.monotonic()))
    finally:  # an interrupt, too, leaves no process
        for process in processes:
            process.close()


def _forget_output(process: RankProcess) -> None:
    """Drop what threads that outlived the last job have printed since, and what is left of a question's answer."""
    for end in (process.output, process.stacks):
        with contextlib.suppress(OSError):
            while end.poll() and read(end):
                pass
