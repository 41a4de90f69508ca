"""Follows the ranks of one run in a thread: brings their events to its state, and minds the time.

The one place where a run's deadlines are kept: after a failure, a stop, a silence (`stall_s`), and after all have
returned. What is decided there is tested without processes, in `state` and `diagnosis`.
"""

from __future__ import annotations

import logging
import re
import threading
import time
import traceback
from collections.abc import Callable, Mapping

from labkit.failures import ledger
from labkit.failures.diagnosis import diagnose_hang, diagnose_own_error
from labkit.failures.facts import Diagnosis, RankFacts
from labkit.failures.first_to_fail import diagnose, others
from labkit.failures.stacks import Stacks
from labkit.monitor.asking import Asking
from labkit.monitor.observers import Observers
from labkit.monitor.record import RunRecord
from labkit.protocol import events
from labkit.protocol.job import Cell

KILL_AGAIN_S = 0.5
"""Time after which ranks are ended once more: finding their child processes is slow, and delays the end of all."""

STARTING_S = 120.0
"""Least time that ranks may take to start, whatever `stall_s` says; importing torch can be slow."""

POLL_S = 0.05
"""How long to wait for what comes from ranks before looking at the clock again …"""

POLL_STOPPING_S = 0.01
"""… and once they were asked to stop."""

STOP_STEPS = 4
"""The grace of a stop in steps. It comes within one, is agreed on in the next, and obeyed in the third; one may be
slower."""

CRASHED = re.compile("Fatal Python error: ")
"""What stands before a crash's stack in the output."""

logger = logging.getLogger("labkit")


class Follower:
    """What follows one run, and decides when its ranks are ended."""

    def __init__(
        self,
        run: RunRecord,
        observers: Observers,
        asking: Asking,
        stall_s: float | None,
        on_end: Callable[[], object],
    ) -> None:
        self._run, self._observers, self._asking = run, observers, asking
        self._engine, self._state = run.engine, run._state
        self._stall_s, self._on_end = stall_s, on_end
        self.diagnosis: Diagnosis | None = None
        """Why the run failed, once it is over; None if it has not."""
        self.stop_outcome = ""
        """ "late" if ranks that were asked to stop were ended because their grace was over; else ""."""
        self._pace_grace_s: float | None = None
        self._own_error: Diagnosis | None = None
        self._thread: threading.Thread | None = None

    @property
    def has_begun(self) -> bool:
        """Whether a thread follows the ranks: it will end them, or see them end."""
        return self._thread is not None

    def begin(self, cells: Mapping[str, Cell], start_s: float, stop_asked: bool) -> None:
        """Follow ranks that have been started at `start_s`, as `time.time()`, and perhaps been asked to stop since."""
        self._run.cells, self._run.start_s, self._state.stop_asked = cells, start_s, stop_asked
        for event in self._engine.poll(timeout_s=0):
            self.take(event)
        thread = threading.Thread(target=self._follow, name="labkit-run", daemon=True)
        thread.start()
        self._thread = thread

    def take(self, event: events.Event) -> None:
        """Note one event."""
        self._observers.tell(lambda each: each.take(event))
        since_launch_s, ended_by_us = self._run.elapsed_s, False
        if isinstance(event, events.Exit):
            ended_by_us = self._engine.killed(event.rank)
            since_launch_s = event.at_s - self._run.start_s if event.at_s else since_launch_s
        self._state.take(event, time.monotonic(), since_launch_s, ended_by_us)

    def _follow(self) -> None:
        try:
            while not self._state.is_over:
                for event in self._engine.poll(timeout_s=POLL_S if self._run.stop_asked_s is None else POLL_STOPPING_S):
                    with self._run.lock:
                        self.take(event)
                self.enforce_deadlines()
        except BaseException as error:  # labkit's own, or the file system's: not one of a rank, and not to be hidden
            self._give_up(error)
        finally:
            try:
                self._engine.close()
            except BaseException as error:
                self._give_up(error)
            finally:
                self.settle()  # whatever happens, a caller that waits for the run does not wait indefinitely

    def _give_up(self, error: BaseException) -> None:
        """Note an error of labkit's own, and end ranks that nobody follows any longer, unless they can be found again.

        What has come from the ranks is kept.
        """
        if self._own_error is None:
            folder = str(self._engine.folder or "") if self._engine.outlives_notebook else ""
            self._own_error = diagnose_own_error(error, "".join(traceback.format_exception(error)), folder)
        if not self._engine.outlives_notebook:
            try:
                self._engine.kill()
            except BaseException as worse:
                logger.error("the ranks could not be ended; run.pids are their processes", exc_info=worse)

    def settle(self) -> None:
        """Say how the run ended. Nothing of it changes any more."""
        try:
            with self._run.lock:
                self._settle()
        except BaseException as error:
            self._give_up(error)
            self.diagnosis = self._own_error
        finally:
            try:
                self._on_end()
            except BaseException as error:
                logger.error("labkit could not note how a run ended", exc_info=error)
            finally:
                self._run.over.set()

    def _settle(self) -> None:
        state = self._state
        exits_s = max(rank.exit_s for rank in state.ranks)
        self._run.end_s = min(time.time(), self._run.start_s + exits_s)
        ended = state.ended if not state.stop_asked else None
        if self._own_error is not None:
            self.diagnosis = self._own_error
            if not self._engine.outlives_notebook:
                state.end_all()
        elif state.has_failed or ended is not None:
            facts = self._facts()
            found = state.decided or ended or diagnose(facts, self._explain_failure)
            self.diagnosis = found._replace(others=found.others or others(facts, found.rank))

    def enforce_deadlines(self) -> None:
        """Do what is due: end ranks, ask those that are silent."""
        now_s, state = time.monotonic(), self._state
        if any(each in self._run.paused_by for each in self._observers):
            state.progress_s = now_s
        with self._run.lock:
            asked_s = self._run.stop_asked_s
            if asked_s is not None and not self.stop_outcome and now_s >= asked_s + self.grace_s:
                self.stop_outcome, state.end_by_s = "late", min(state.end_by_s, now_s)
        if now_s >= state.end_by_s:
            state.end_by_s = now_s + KILL_AGAIN_S
            self._engine.kill()
            return
        if self._stall_s is not None and not (state.stop_asked or state.is_queued or state.end_by_s < float("inf")):
            is_starting = any(rank.phase == "starting" for rank in state.ranks)
            if now_s - state.progress_s > (max(self._stall_s, STARTING_S) if is_starting else self._stall_s):
                with self._run.lock:
                    self._end_the_silent(self._stall_s, now_s)
                return
        with self._run.lock:
            self._observers.tell(lambda each: each.look(now_s - state.progress_s))

    def _end_the_silent(self, stall_s: float, now_s: float) -> None:
        """End ranks that have been silent for too long, once those have heard that ask them why."""
        ranks, silent_s = self._state.ranks, now_s - self._state.progress_s
        query = self._asking
        if self._observers.ask(query, lambda query: query.is_querying(silent_s), False):
            return
        silent = [number for number, rank in enumerate(ranks) if not rank.returned and rank.phase != "idle"]
        first = min(silent, key=lambda n: max(self._state.recorded.progress(n).time_s, ranks[n].printed_s))
        found = self._observers.ask(query, lambda query: query.explain_silence(stall_s, first), None)
        found = found or diagnose_hang(Stacks(), stall_s, first)
        if found.rank is not None:
            ranks[found.rank].phase = "failed"
        self._state.end_for(found, now_s)

    @property
    def grace_s(self) -> float:
        """How long ranks that are asked to stop have, in s."""
        # A stop is obeyed in `worker.log`, at a step that the ranks agree on, so a rank that computes, or waits for a
        # disk or for the network, must be given time. A fixed patience is no good, for a long step exceeds it. Ranks
        # that are stuck sit it out.
        if self._run.stop_grace_s is not None:
            return self._run.stop_grace_s
        if self._pace_grace_s is None:
            longest_s = self._state.recorded.longest_step_s([rank.began_s for rank in self._state.ranks])
            self._pace_grace_s = STOP_STEPS * longest_s
        return self._engine.stop_grace_s + self._pace_grace_s

    def _explain_failure(self, culprit: RankFacts, cause: str, ranks: list[RankFacts]) -> Diagnosis | None:
        """Return what the ranks' collectives say of a failure."""
        return self._observers.ask(self._asking, lambda _: ledger.explain(culprit, cause, ranks), None)

    def _facts(self) -> list[RankFacts]:
        """Return what is known of each rank, for the diagnosis."""
        for rank in self._state.ranks:
            rank.output_end, *crash = CRASHED.split(rank.output.tail(300), maxsplit=1)
            rank.crash = "".join(crash)
            rank.last_step = self._state.recorded.progress(rank.rank).last_step
            rank.ended_by_us = rank.ended_by_us or self._engine.killed(rank.rank)
        facts: list[RankFacts] = list(self._state.ranks)
        self._observers.tell(lambda each: each.add_facts(facts))
        return facts
