"""Follows the ranks of one run in a thread: brings their events to its state, and minds the time.

The one place where a run's deadlines are kept: after a failure, a stop, a silence (`timeout_s`), and after all have
returned. What is decided there is tested without processes, in `state`, `stopping` and `diagnosis`.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Mapping

from labkit.engines.base import Engine
from labkit.monitor.companion import Companion
from labkit.monitor.diagnosis import (
    NOTHING_MISSED,
    Diagnosis,
    Missed,
    RankFacts,
    diagnose,
    diagnose_ended,
    diagnose_hang,
    diagnose_own_error,
)
from labkit.monitor.stacks import Frame, RankStack, Stacks, is_complete, parse
from labkit.monitor.state import RankState, RunState
from labkit.monitor.stopping import STEPS
from labkit.protocol import events
from labkit.protocol.job import Cell

KILL_AGAIN_S = 0.5
"""Time after which ranks are ended once more: to look for their children is dear, and delays the end of all."""

STARTING_S = 120.0
"""Least time that ranks may take to start, whatever `timeout_s` says; importing torch can be slow."""

SLOWEST = 4
"""Of the time that an answer of a rank has just taken, how much the others have at least."""

FIRST_STEP_S = 60.0
"""How long ranks that have begun may log nothing before they are asked, once, where they stand."""

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
        when_returned: str,
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
        self._timeout_s, self._when_returned, self._on_end = timeout_s, when_returned, on_end
        self.stop_asked_s: float | None = None
        """When the run was asked to stop, as `time.monotonic()`."""
        self._stop_grace_s: float | None = None
        self._stacks_asked: list[int] = []
        self._stacks_asked_s = self._answered_s = 0.0
        self._given_up: dict[int, set[str]] = {}
        """By rank, what it did not say when it was asked the first time: nobody waits for it the second time."""
        self._missed: Missed | None = None
        self._missed_anywhere: Missed | None = None
        """The same, wherever the ranks stand."""
        self._hang_asked_s: float | None = None
        self._hang: Diagnosis | None = None
        self._first_step_asked_s: float | None = None
        self._no_first_step = ""
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
        now_s = time.monotonic()
        for companion in self._companions:
            companion.take(event)
        since_launch_s, ended_by_us = self.elapsed_s, False
        if isinstance(event, events.Exit):
            ended_by_us = self.engine.killed(event.rank)
            since_launch_s = event.at_s - self.start_s if event.at_s else since_launch_s
        self.state.take(event, now_s, since_launch_s, ended_by_us)
        if isinstance(event, (events.Stack, events.Answered)):
            self._answered_s = now_s

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
            ended = state.job_ended if not state.stop_asked else None
            if self._own_error is not None:
                self.diagnosis = self._own_error
            elif state.has_failed or ended is not None:
                facts = self._facts()
                known = [companion.explain_failure for companion in self._companions]
                self.diagnosis = self._hang or (diagnose_ended(ended, facts) if ended else diagnose(facts, known))
        self._on_end()
        self.over.set()

    # The clock

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
                    self._end_the_hang(self._timeout_s, now_s)
                return
        with self.lock:
            self._mind_the_first_step(now_s)

    def _end_the_hang(self, timeout_s: float, now_s: float) -> None:
        """Ask the silent ranks where they stand, and end the run when they have said so."""
        if self._hang_asked_s is None or self._hang_asked_s < self.state.progress_s:
            self._hang_asked_s = now_s  # anew, if a rank made progress after it was asked last
            self.ask_for_stacks()
        elif self._hang is None and self.stacks_have_come():
            ranks = self.state.ranks
            silent = [number for number, rank in enumerate(ranks) if not rank.returned and rank.phase != "idle"]
            first = min(silent, key=lambda number: self.state.recorded.progress(number).time_s)
            stacks = self.stacks()
            self._hang = diagnose_hang(stacks, timeout_s, first, self.missed(stacks))
            if self._hang.rank is not None:
                ranks[self._hang.rank].phase = "failed"
            self.state.has_failed, self.state.end_by_s = True, now_s

    def _mind_the_first_step(self, now_s: float) -> None:
        """Have ranks of which none has logged anything for long say where they stand, though nobody has asked."""
        state = self.state
        if self._no_first_step or state.recorded.names or state.stop_asked or not state.at_work:
            return
        if not {rank.phase for rank in state.ranks} <= {"running", "finished"}:
            return
        if self._first_step_asked_s is None:
            if now_s - state.progress_s > FIRST_STEP_S:
                self._first_step_asked_s = now_s
                self.ask_for_stacks()
        elif self.stacks_have_come() or now_s - self._first_step_asked_s > self.engine.stacks_s:
            self._no_first_step = f"no rank has logged anything in {FIRST_STEP_S:g} s:\n{self.stacks()}"

    @property
    def notice(self) -> str:
        """What a cluster says of the run, and where ranks stand that are long in coming to a first step."""
        said = "" if self.state.recorded.names or self.over.is_set() else self._no_first_step
        return "\n".join(filter(None, (self.state.notice, said)))

    # Stopping

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
        return max(self.engine.stop_grace_s, STEPS * self.state.pace.longest_step_s)

    def _mind_the_stop(self, end_s: float, now_s: float) -> None:
        """End ranks that were asked to stop when their grace is over, or nothing can come of it."""
        at_work = self.state.at_work
        in_vain = any(companion.mind_the_stop(at_work, end_s, now_s) for companion in self._companions)
        if in_vain or now_s >= end_s:
            self.cut_short = "in vain" if in_vain else "late"
            self.state.end_by_s = min(self.state.end_by_s, now_s)

    # Where the ranks stand

    def ask_for_stacks(self) -> None:
        """Ask every rank where it stands; what it answered before is forgotten."""
        self._missed, self._missed_anywhere, self._given_up = None, None, {}
        self._ask_where_they_stand()

    def _ask_where_they_stand(self) -> None:
        for rank in self.state.ranks:
            rank.stack_text = ""
            rank.has_answered = rank.has_answered and not rank.is_at_work
        for companion in self._companions:
            companion.ask(self.state.at_work)
        self._stacks_asked_s = time.monotonic()
        self._stacks_asked = self.engine.ask_for_stacks() if not self.over.is_set() else []

    def stacks_have_come(self) -> bool:
        """Return whether all that were asked have answered, or will not; twice, where they seem to have missed others.

        Ranks answer at different moments, so of ranks that go on one may seem to wait for another that was there since.
        """
        ranks = {number: self.state.ranks[number] for number in self._stacks_asked}
        missing = {number: _missing(rank) for number, rank in ranks.items()}
        mute = {number for companion in self._companions for number in companion.mute()}
        is_awaited = any(missing[number] - self._given_up.get(number, set()) for number in ranks if number not in mute)
        patience_s = max(self.engine.stacks_s, SLOWEST * (self._answered_s - self._stacks_asked_s))
        if is_awaited and time.monotonic() < self._stacks_asked_s + patience_s:
            return False
        places = self._places()
        self._missed = self._explain(places)
        # A rank in a loop stands at one line and then at another, and misses the same call.
        nowhere = Stacks(RankStack(at.rank, [], {}, at.note) for at in places)
        before, self._missed_anywhere = self._missed_anywhere, self._explain(nowhere)
        if before is None and self._missed.text:
            self._given_up = missing
            self._ask_where_they_stand()
            return False
        if before is not None and before != self._missed_anywhere:
            self._missed = NOTHING_MISSED
        return True

    def stacks(self) -> Stacks:
        """Return where every rank stands, by what has come."""
        found = self._places()
        found.missed = self.missed(found).text
        return found

    def missed(self, places: Stacks) -> Missed:
        """Return in which collective ranks missed each other, by what has come."""
        return self._missed or self._explain(places)

    def _explain(self, places: Stacks) -> Missed:
        found = (companion.explain_wait(places) for companion in self._companions)
        return next((missed for missed in found if missed != NOTHING_MISSED), NOTHING_MISSED)

    def _places(self) -> Stacks:
        found = Stacks()
        for number, rank in enumerate(self.state.ranks):
            frames = parse(rank.stack_text)
            if rank.phase == "idle":
                frames, note = [], "has no part in the cell"
            elif rank.returned:
                frames, note = [], self._when_returned
            elif rank.exit_code is not None or rank.phase == "failed":
                frames, note = [], f"has ended ({rank.phase})"
            else:
                note = "is still starting" if rank.phase in ("queued", "starting") else "did not answer"
            found.append(RankStack(number, frames, self.cells, note))
        return found

    def _facts(self) -> list[RankFacts]:
        """Return what is known of each rank, for the diagnosis."""
        for rank in self.state.ranks:
            rank.output_end, _, dump = rank.output.tail(300).partition("Fatal Python error: ")
            frames = [Frame(*f) for f in rank.failure.frames] if rank.failure else parse(dump, thread="current")
            rank.stack = RankStack(rank.rank, frames, self.cells) if frames else None
            rank.last_step = self.state.recorded.progress(rank.rank).last_step
            rank.ended_by_us = rank.ended_by_us or self.engine.killed(rank.rank)
        return list(self.state.ranks)


def _missing(rank: RankState) -> set[str]:
    """Return what a rank that was asked where it stands has not said."""
    said = {"stack": is_complete(rank.stack_text), "details": rank.has_answered}
    return {what for what, is_there in said.items() if not is_there}
