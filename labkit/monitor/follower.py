"""Follows the ranks of one run in a thread: brings their events to its state, and minds the time.

The one place where a run's deadlines are kept: after a failure, a stop, a silence (`timeout_s`), and after all have
returned. What is decided there is tested without processes, in `state` and `diagnosis`.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Mapping

from labkit.engines.base import Engine
from labkit.monitor.companion import Companion
from labkit.monitor.diagnosis import (
    Diagnosis,
    RankFacts,
    diagnose,
    diagnose_own_error,
    diagnose_silence,
    others,
)
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


class Follower:
    """What follows one run. Everything that others read or call holds `lock`."""

    def __init__(
        self,
        engine: Engine,
        world_size: int,
        timeout_s: float | None,
        on_end: Callable[[], object],
        companions: list[Companion],
    ) -> None:
        self.engine, self._companions = engine, companions
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
        for companion in self._companions:
            companion.take(event)
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
        except Exception as error:  # labkit's own, or the file system's: not one of a rank, and not to be hidden
            self._give_up(error)
        finally:
            try:
                self.engine.close()
            except Exception as error:
                self._give_up(error)
            finally:
                self.settle()  # whatever happens, who waits for the run does not wait for ever

    def _give_up(self, error: Exception) -> None:
        """Note an error of labkit's own, and end ranks that nobody follows any longer, unless they can be found again.

        What has come from the ranks is kept.
        """
        if self._own_error is None:
            folder = str(self.engine.folder or "") if self.engine.outlives_notebook else ""
            self._own_error = diagnose_own_error(error, traceback.format_exc(), folder)
        if not self.engine.outlives_notebook:
            try:
                self.engine.kill()
            except Exception as worse:
                error.add_note(f"and the ranks could not be ended: {worse}")

    def settle(self) -> None:
        """Say how the run ended. Nothing of it changes any more."""
        with self.lock:
            state = self.state
            exits_s = max(rank.exit_s for rank in state.ranks)
            self.end_s = min(time.time(), self.start_s + exits_s)
            ended = state.ended if not state.stop_asked else None
            if self._own_error is not None:
                self.diagnosis = self._own_error
            elif state.has_failed or ended is not None:
                facts = self._facts()
                known = [companion.explain_failure for companion in self._companions]
                if ended:
                    ended = ended._replace(others=others(facts, ended.rank))
                self.diagnosis = self._silence or ended or diagnose(facts, known)
        self._on_end()
        self.over.set()

    def mind_the_time(self) -> None:
        """Do what is due: end ranks, ask those that are silent."""
        now_s, state = time.monotonic(), self.state
        if any(companion.holds_the_time for companion in self._companions):
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
            for companion in self._companions:
                companion.look(now_s - state.progress_s)

    def _end_the_silent(self, timeout_s: float, now_s: float) -> None:
        """End ranks that have been silent for too long, once those have heard that ask them why."""
        ranks, silent_s = self.state.ranks, now_s - self.state.progress_s
        if any(companion.asks_why(silent_s) for companion in self._companions):
            return
        silent = [number for number, rank in enumerate(ranks) if not rank.returned and rank.phase != "idle"]
        first = min(silent, key=lambda number: self.state.recorded.progress(number).time_s)
        found = (companion.explain_silence(timeout_s, first) for companion in self._companions)
        self._silence = next(filter(None, found), None) or diagnose_silence(timeout_s, first, self._facts())
        if self._silence.rank is not None:
            ranks[self._silence.rank].phase = "failed"
        self.state.has_failed, self.state.end_by_s = True, now_s

    def ask_to_stop(self, grace_s: float | None) -> None:
        """Begin to stop the run; asked again, only take another grace. In s."""
        with self.lock:
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

    @property
    def grace_s(self) -> float:
        """How long ranks that are asked to stop have, in s."""
        if self._stop_grace_s is not None:
            return self._stop_grace_s
        return self.engine.stop_grace_s + sum(companion.grace_s for companion in self._companions)

    def _mind_the_stop(self, end_s: float, now_s: float) -> None:
        """End ranks that were asked to stop when their grace is over, or nothing can come of it."""
        at_work = self.state.at_work
        in_vain = any(companion.mind_the_stop(at_work, end_s, now_s) for companion in self._companions)
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
        for companion in self._companions:
            companion.add_facts(facts)
        return facts
