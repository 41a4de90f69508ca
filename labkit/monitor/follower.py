"""Follows the ranks of one run in a thread: brings their events to its state, and minds the time.

The one place where a run's deadlines are kept: after a failure, a stop, a silence (`timeout_s`), and after all have
returned. What is decided there is tested without processes, in `state` and `diagnosis`.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping

from labkit.engines.base import Engine
from labkit.failures.diagnosis import diagnose_own_error, diagnose_silence
from labkit.failures.facts import Diagnosis, RankFacts
from labkit.failures.first_to_fail import diagnose, others
from labkit.failures.threads import name_dead_threads
from labkit.monitor.observers import Observers
from labkit.monitor.state import RunState
from labkit.protocol import events
from labkit.protocol.job import Cell

KILL_AGAIN_S = 0.5
"""Time after which ranks are ended once more: to look for their children is dear, and delays the end of all."""

STARTING_S = 120.0
"""Least time that ranks may take to start, whatever `timeout_s` says; importing torch can be slow."""

POLL_S = 0.05
"""How long to wait for what comes from ranks before looking at the clock again …"""

POLL_STOPPING_S = 0.01
"""… and once they were asked to stop."""

LOCK_S = 1.0
"""How long whoever stops a run waits for the lock; one that is held for longer is held by what does not go on."""

logger = logging.getLogger("labkit")


class Follower:
    """What follows one run. Everything that others read or call holds `lock`."""

    def __init__(
        self,
        engine: Engine,
        world_size: int,
        timeout_s: float | None,
        on_end: Callable[[], object],
        observers: Observers,
    ) -> None:
        self.engine, self._observers = engine, observers
        self.state = RunState(world_size, engine.failure_grace_s, time.monotonic())
        self.lock = threading.RLock()
        self.over = threading.Event()
        """Set once the run has ended and how is final."""
        self.diagnosis: Diagnosis | None = None
        """Why the run failed, once it is over; None if it has not."""
        self.cut_short = ""
        """Why ranks that were asked to stop were ended: "in vain", "late", or "" if they ended by themselves."""
        self.cells: Mapping[str, Cell] = {}
        self.start_s = time.time()
        self.end_s: float | None = None
        self._timeout_s, self._on_end = timeout_s, on_end
        self.stop_asked_s: float | None = None
        """When the run was asked to stop, as `time.monotonic()`."""
        self._stop_grace_s: float | None = None
        self._silence: Diagnosis | None = None
        self._own_error: Diagnosis | None = None
        self._thread: threading.Thread | None = None

    @property
    def elapsed_s(self) -> float:
        """Seconds from the launch until the end, or until now."""
        return (self.end_s or time.time()) - self.start_s

    @property
    def has_begun(self) -> bool:
        """Whether a thread follows the ranks: it will end them, or see them end."""
        return self._thread is not None

    def begin(self, cells: Mapping[str, Cell], start_s: float, stop_asked: bool) -> None:
        """Follow ranks that have been started at `start_s`, as `time.time()`, and perhaps been asked to stop since."""
        self.cells, self.start_s, self.state.stop_asked = cells, start_s, stop_asked
        for event in self.engine.poll(timeout_s=0):
            self.take(event)
        thread = threading.Thread(target=self._follow, name="labkit-run", daemon=True)
        thread.start()
        self._thread = thread

    def take(self, event: events.Event) -> None:
        """Note one event."""
        self._observers.take(event)
        since_launch_s, ended_by_us = self.elapsed_s, False
        if isinstance(event, events.Exit):
            ended_by_us = self.engine.killed(event.rank)
            since_launch_s = event.at_s - self.start_s if event.at_s else since_launch_s
        self.state.take(event, time.monotonic(), since_launch_s, ended_by_us)

    def _follow(self) -> None:
        try:
            while not self.state.is_over:
                for event in self.engine.poll(timeout_s=POLL_S if self.stop_asked_s is None else POLL_STOPPING_S):
                    with self.lock:
                        self.take(event)
                self.mind_the_time()
        except BaseException as error:  # labkit's own, or the file system's: not one of a rank, and not to be hidden
            self._give_up(error)
        finally:
            try:
                self.engine.close()
            except BaseException as error:
                self._give_up(error)
            finally:
                self.settle()  # whatever happens, who waits for the run does not wait for ever

    def settle_if_dead(self) -> None:
        """End a run whose thread has ended without a word, so that nobody waits for it: for those who wait."""
        if self._thread is not None and not self._thread.is_alive() and not self.over.is_set():
            self._give_up(RuntimeError("the thread that followed them has ended"))
            self.settle()

    def _give_up(self, error: BaseException) -> None:
        """Note an error of labkit's own, and end ranks that nobody follows any longer, unless they can be found again.

        What has come from the ranks is kept.
        """
        folder = str(self.engine.folder or "") if self.engine.outlives_notebook else ""
        not_ended = ""
        if not self.engine.outlives_notebook:
            try:
                self.engine.kill()
            except BaseException as worse:
                not_ended = f"{type(worse).__name__}: {worse}"
        if self._own_error is None:
            trace = "".join(traceback.format_exception(error))
            self._own_error = diagnose_own_error(error, trace, folder, not_ended)

    def settle(self) -> None:
        """Say how the run ended. Nothing of it changes any more."""
        try:
            with self.lock:
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
                self.over.set()

    def _settle(self) -> None:
        state = self.state
        exits_s = max(rank.exit_s for rank in state.ranks)
        self.end_s = min(time.time(), self.start_s + exits_s)
        ended = state.ended if not state.stop_asked else None
        if self._own_error is not None:
            self.diagnosis = self._own_error
            if not self.engine.outlives_notebook:
                state.end_all()
        elif state.has_failed or ended is not None:
            facts = self._facts()
            if ended:
                ended = ended._replace(others=others(facts, ended.rank))
            diagnosis = self._silence or ended or diagnose(facts, [self._observers.explain_failure])
            blamed = "" if diagnosis.rank is None else facts[diagnosis.rank].output_end
            self.diagnosis = name_dead_threads(diagnosis, blamed, self.cells)

    def mind_the_time(self) -> None:
        """Do what is due: end ranks, ask those that are silent."""
        now_s, state = time.monotonic(), self.state
        if self._observers.holds_the_time:
            state.progress_s = now_s
        with self.lock:
            if self.stop_asked_s is not None and not self.cut_short:
                self._mind_the_stop(self.stop_asked_s + self.grace_s, now_s)
        if now_s >= state.end_by_s:
            state.end_by_s = now_s + KILL_AGAIN_S
            self.engine.kill()
            return
        if self._timeout_s is not None and not (state.stop_asked or state.is_queued or state.end_by_s < float("inf")):
            is_starting = any(rank.phase == "starting" for rank in state.ranks)
            if now_s - state.progress_s > (max(self._timeout_s, STARTING_S) if is_starting else self._timeout_s):
                with self.lock:
                    self._end_the_silent(self._timeout_s, now_s)
                return
        with self.lock:
            self._observers.look(now_s - state.progress_s)

    def _end_the_silent(self, timeout_s: float, now_s: float) -> None:
        """End ranks that have been silent for too long, once those have heard that ask them why."""
        ranks, silent_s = self.state.ranks, now_s - self.state.progress_s
        if self._observers.asks_why(silent_s):
            return
        silent = [number for number, rank in enumerate(ranks) if not rank.returned and rank.phase != "idle"]
        first = min(silent, key=lambda n: max(self.state.recorded.progress(n).time_s, ranks[n].printed_s))
        found = self._observers.explain_silence(timeout_s, first)
        self._silence = found or diagnose_silence(timeout_s, first, self._facts())
        if self._silence.rank is not None:
            ranks[self._silence.rank].phase = "failed"
        self.state.has_failed, self.state.end_by_s = True, now_s

    def ask_to_stop(self, grace_s: float | None) -> None:
        """Begin to stop the run; asked again, only take another grace. In s."""
        with self._lock_unless_stuck():
            if self.over.is_set():
                return
            if grace_s is not None:
                self._stop_grace_s = grace_s
            if self.stop_asked_s is not None:
                return
            self.state.stop_asked, self.stop_asked_s = True, time.monotonic()
            if any(rank.phase in ("starting", "queued") for rank in self.state.ranks):
                self.engine.kill()  # nothing to keep
            else:
                self.engine.ask_to_stop()

    @contextlib.contextmanager
    def _lock_unless_stuck(self) -> Iterator[None]:
        """Hold the lock, or do without it: whoever stops a run is not to wait for an observer that never returns."""
        has_it = self.lock.acquire(timeout=LOCK_S)
        try:
            yield
        finally:
            if has_it:
                self.lock.release()

    @property
    def grace_s(self) -> float:
        """How long ranks that are asked to stop have, in s."""
        if self._stop_grace_s is not None:
            return self._stop_grace_s
        return self.engine.stop_grace_s + self._observers.grace_s

    def _mind_the_stop(self, end_s: float, now_s: float) -> None:
        """End ranks that were asked to stop when their grace is over, or nothing can come of it."""
        at_work = self.state.at_work
        in_vain = self._observers.mind_the_stop(at_work, end_s, now_s)
        if in_vain or now_s >= end_s:
            self.cut_short = "in vain" if in_vain else "late"
            self.state.end_by_s = min(self.state.end_by_s, now_s)

    def _facts(self) -> list[RankFacts]:
        """Return what is known of each rank, for the diagnosis."""
        for rank in self.state.ranks:
            rank.output_end, _, rank.crash = rank.output.tail(300).partition("Fatal Python error: ")
            rank.last_step = self.state.recorded.progress(rank.rank).last_step
            rank.ended_by_us = rank.ended_by_us or self.engine.killed(rank.rank)
        facts: list[RankFacts] = list(self.state.ranks)
        self._observers.add_facts(facts)
        return facts
