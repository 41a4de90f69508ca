"""The engines that carry one job on a session's ranks on a cluster, through a directory of the job's own."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from typing import Any

from labkit.failures.grouping import rank_list
from labkit.launchers import job_events
from labkit.launchers.directory_engine import folder_gone
from labkit.protocol import events
from labkit.protocol.job import Job
from labkit.protocol.pages import help_hint
from labkit.rank.isolation import Isolation
from labkit.session.cluster_ranks import KILL_S, ClusterRanks, ReservedJobEngine
from labkit.session.ranks import Replaced, replaced_in_words
from labkit.session.turns import Turn

FAILURE_GRACE_S = 2.0
"""How long the other ranks may still report after the first has failed: what they write may be seen late."""

OUTSIDE_S = 30.0
"""How long the launcher may take to say why it has ended a rank."""


class JobEngine(ReservedJobEngine):
    """Carries one launched function.

    A rank ends in one of four ways, of which only the first two are final when they are read: it did its part; it was
    ended with its run; the launcher ended it, or had it stop, and may say why, which is waited for (`_withheld`); or
    nothing is heard of it any more.
    """

    failure_grace_s = FAILURE_GRACE_S

    def __init__(
        self,
        reserve: ClusterRanks,
        only: Sequence[int],
        world_size: int,
        turn: Turn,
        about: dict[str, Any],
        number: int = 0,
    ) -> None:
        number = number or reserve.directory.newest_job() + 1
        super().__init__(world_size, reserve.directory.of_job(number), number)
        self.about = {"launcher": "session", "world_size": world_size, **about}
        """What is kept in the job's directory."""
        self.outlives_notebook = reserve.outlives_notebook
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

    # For the run

    def start(self, job: Job) -> None:
        """Give the ranks the job. Returns at once; a rank whose process is new begins when it is ready."""
        self._turn.take(self)
        try:
            self._check_nobody_else_is_at_it()
            self._reserve.take(self)
            self._emit_what_is_awaited(self._reserve.take_replaced())
            self.about |= {"only": self._only, "processes": self._reserve.incarnations}
            self.directory.create(job._replace(isolation=Isolation(os.getcwd())), self.about)
            self._is_given = True
            self._reserve.directory.give_job(self.number, self._only)
            self._emit_who_is_absent()
        except BaseException:
            self.kill()  # interrupted, perhaps when the ranks had it: nobody would follow them
            self._give_back()
            raise

    def follow(self) -> None:
        """Follow a job that the ranks have been given before."""
        self._turn.take(self)
        self._reserve.take(self)
        self._is_given = True
        self._ended_by_us = self._reserve.directory.given_up(self.number)
        if kept := self.about.get("ended"):
            self._ending = job_events.JobEnded(-1, *kept)
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

    def _ask(self, word: str) -> bool:
        if word == "stop":
            super()._ask(word)  # for who attaches later
        try:
            self._reserve.directory.ask(word)
        except OSError as error:
            self.emit(job_events.Notice(-1, f"the ranks could not be asked ({word}): {error}"))
            return False
        return True

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
        self._give_back()

    def _give_back(self) -> None:
        self._reserve.give_back(self)
        self._turn.give_back(self)
        self.closed.set()

    def _still(self) -> list[int]:
        return [rank for rank in self._only if rank not in self._exits]

    def _new(self) -> list[events.Event]:
        found = super()._new()
        with self._lock:
            ending = self._ending
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
            ending = folder_gone(self.directory.path)
            self.end_with(ending)
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
        self._reserve.look()
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
        self._reserve.look()
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
