"""Asks the ranks of one run where they are: for `run.stacks()`, and when they have been silent for long."""

from __future__ import annotations

import pickle
import time
from collections.abc import Generator, Iterator

from labkit.failures import ledger
from labkit.failures.diagnosis import diagnose_hang
from labkit.failures.evidence import ABORTED, is_only_evidence, was_aborted_by_watchdog
from labkit.failures.facts import Diagnosis, RankFacts
from labkit.failures.missed import NOTHING_MISSED, SILENT, Call, Comparison, Missed, RankCalls, find
from labkit.failures.stacks import Frame, RankStack, Stacks, is_complete, parse
from labkit.monitor.observers import RunObserver
from labkit.protocol.events import Answered, Attached, Event, Failure, Log, Output, Stack, Started
from labkit.protocol.job import Job
from labkit.rank.recorder import NO_GROUP, Collectives
from labkit.rank.report_collectives import KIND, LEFT, THREADS

SLOWEST = 4
"""How many times as long as the slowest answer so far the other ranks have, at least."""

ROUNDS = 4
"""The most times that a question is asked, until two answers in a row are alike."""

FIRST_STEP_S = 60.0
"""How long ranks that have begun may log and print nothing before they are asked, once, where they are; in seconds."""

ANSWER_S = 3.0
"""How long to wait for the others' answers after a failure that only says that another rank was not there."""

LAST_WORDS_S = 5.0
"""How old the stack of a rank that was ended from outside may be: its agent asks for one before."""

QUIET_S = 2.0
"""Once one has gone, ranks are asked where they are if another has logged and printed nothing for this many seconds."""

ASK_AGAIN = 2.0
"""Ranks that turned out to be working are asked again once they have been silent this many times as long."""

FAILED_S = 0.1
"""Time after a failure until ranks that have not ended are asked where they are. Most have failed by then, too."""


class Asking(RunObserver):
    """The newest question to the ranks of a run, and their answers."""

    title = "observer of stacks"

    def __init__(self) -> None:
        self._asked: list[int] = []
        self._asked_s = self._answered_s = 0.0
        self._texts: dict[int, str] = {}
        """What `faulthandler` has written since the last question, by rank."""
        self._last_words: dict[int, tuple[str, float]] = {}
        """The newest stack that has come completely, no matter who asked for it, and when; by rank."""
        self._said: dict[int, Collectives] = {}
        """The collectives that a rank has called, by rank; its newest answer, or what it said as it failed."""
        self._stale: set[int] = set()
        """Ranks of which `_said` and `_threads` are what they said before the newest question.

        They are kept: the answer to an earlier question may be on its way, and have come in part.
        """
        self._told: set[int] = set()
        """Ranks whose hooks have answered completely, or that have failed, which implies it."""
        self._given_up: dict[int, set[str]] = {}
        """What a rank left unanswered the last time, by rank. It is not waited for again."""
        self._rounds = 0
        """How many times the ranks have been asked the newest question."""
        self._missed: Missed | None = None
        self._missed_anywhere: Missed | None = None
        """The same, without the lines at which the ranks are."""
        self._is_cell = False
        self._why_asked_s: float | None = None
        self._threads: dict[int, tuple[list[Frame], list[Frame]]] = {}
        """The main thread's frames if they are too many for `_texts`, and another's that waits for ranks; by rank."""
        self._left: dict[int, tuple[str, Collectives | None]] = {}
        """Ranks that have left their process group: the call by which they did, and what they had called by then."""
        self._heard_s: dict[int, float] = {}
        """When each rank last began, logged or printed."""
        self._silent_s = 0.0
        """For how long all have been silent."""
        self._looking = self._watch()
        """What `look` goes on with."""
        self._has_failed = self._is_failure_asked = False
        self._stuck_notice = self._no_first_step = ""

    def begin(self, job: Job) -> Job:
        """Record whether the run is a cell on reserved ranks."""
        self._is_cell = job.group is not None
        return job

    def take(self, event: Event) -> None:
        """Record what a rank answers."""
        if isinstance(event, Started):
            self._said.pop(event.rank, None)
        if isinstance(event, Attached) and event.kind == KIND:
            self._take_calls(Collectives(*pickle.loads(event.blob)))
        if isinstance(event, Attached) and event.kind == THREADS:
            deep, other = pickle.loads(event.blob)
            self._threads[event.rank] = [Frame(*at) for at in deep], [Frame(*at) for at in other]
        if isinstance(event, Attached) and event.kind == LEFT:
            frames = [Frame(*at) for at in pickle.loads(event.blob)]
            place = RankStack(event.rank, frames, self.run.cells).place
            call = f"destroy_process_group at {place}" if place else "destroy_process_group"
            self._left[event.rank] = call, self._said.get(event.rank)
        if isinstance(event, (Started, Log, Output)):
            self._heard_s[event.rank] = time.monotonic()
        if isinstance(event, Stack):
            text = self._texts[event.rank] = self._texts.get(event.rank, "") + event.text
            if is_complete(text):
                self._last_words[event.rank] = text, time.monotonic()
        if isinstance(event, (Answered, Failure)):
            self._told.add(event.rank)
            self._stale.discard(event.rank)
        if isinstance(event, (Stack, Answered)):
            self._answered_s = time.monotonic()

    def _take_calls(self, said: Collectives) -> None:
        """Record which calls a rank has made, unless its process was asked when the function was over.

        By then it is in no call, and soon in no group. What the rank said as it failed or returned is what counts.
        """
        before = self._said.get(said.rank)
        if before is None or not (before.is_last or (said.unknown == NO_GROUP and self.run.returned[said.rank])):
            self._said[said.rank] = said
        self._stale.discard(said.rank)

    # Asking

    def ask_and_wait(self) -> Stacks:
        """Ask the ranks where they are, wait while answers may come, and return the answers."""
        with self.run.lock:
            self.ask()
        while True:
            with self.run.lock:
                if self.have_come() or self.run.over.is_set():
                    return self.stacks()
            time.sleep(0.005)

    def ask(self) -> None:
        """Ask every rank where it is, and forget what it answered before."""
        self._missed, self._missed_anywhere, self._given_up, self._rounds = None, None, {}, 1
        self._ask()

    def _ask(self) -> None:
        run, at_work = self.run, self._at_work()
        self._texts, self._told, self._stale = {}, self._told - at_work, at_work
        self._asked_s = time.monotonic()
        self._asked = run.engine.ask_for_stacks() if not run.over.is_set() else []

    def _at_work(self) -> set[int]:
        return {rank for rank, state in enumerate(self.run.states) if state in ("starting", "running")}

    def have_come(self) -> bool:
        """Return whether all that were asked have answered, or will not; twice alike, where they seem to miss others.

        Ranks answer at different moments, so of ranks that go on one may seem to wait for another that was there since.
        On a busy machine an answer may come too late for one question, so more than two are asked if need be.
        """
        # A process whose function has returned since is on its way out, and may answer nothing more.
        missing = {rank: self._missing(rank) for rank in self._at_work() & {*self._asked}}
        is_awaited = any(what - self._given_up.get(rank, set()) for rank, what in missing.items())
        patience_s = max(self.run.engine.stacks_s, SLOWEST * (self._answered_s - self._asked_s))
        if is_awaited and time.monotonic() < self._asked_s + patience_s:
            return False
        places = self._places()
        self._missed = self._explain(places)
        # A rank in a loop stands at one line and then at another, and misses the same call.
        nowhere = Stacks(RankStack(at.rank, [], {}, at.note) for at in places)
        before, self._missed_anywhere = self._missed_anywhere, self._explain(nowhere)
        if before == self._missed_anywhere or not (before or self._missed.text):
            return True
        if self._missed.text and self._rounds < ROUNDS:
            self._rounds, self._given_up = self._rounds + 1, missing
            self._ask()
            return False
        self._missed = NOTHING_MISSED._replace(concerned=self._missed.concerned)
        return True

    def _missing(self, rank: int) -> set[str]:
        """Return what a rank has left unanswered so far."""
        said = {"stack": is_complete(self._texts.get(rank, "")), "details": rank in self._told}
        return {what for what, is_there in said.items() if not is_there}

    def all_may_wait_for(self, rank: int) -> bool:
        """Ask the ranks; return whether all that are at work wait in calls that need this one, as far as is known."""
        self.ask_and_wait()
        with self.run.lock:
            calls = [each for each in self._calls(self._places()) if each.rank in self._at_work()]
        compared = Comparison(calls)

        def may_wait(each: RankCalls) -> bool:
            waits = compared.waits(each.rank)
            return each.is_blocked and (not waits or any(rank in wait.absent for wait in waits))

        return bool(calls) and all(map(may_wait, calls))

    # What has come

    def stacks(self) -> Stacks:
        """Return where every rank is, from the answers so far."""
        found = self._places()
        found.missed = (self._missed or self._explain(found)).text
        return found

    def _explain(self, places: Stacks) -> Missed:
        return find(self._calls(places))

    def _calls(self, places: Stacks) -> list[RankCalls]:
        return [
            RankCalls(at.rank, self._calls_of(at.rank), at.place_of_wait, at.in_words, at.waits_for_ranks)
            for at in places
        ]

    def _calls_of(self, rank: int) -> Collectives:
        return self.last_said(rank) or Collectives(rank, unknown=SILENT)

    def last_said(self, rank: int) -> Collectives | None:
        """Return a rank's newest answer about its calls; if it has left its group, the one that it sent then."""
        said = self._said.get(rank)
        if said is not None and not said.is_last and rank in self._stale:
            said = None
        if rank in self._left and (said is None or said.unknown == NO_GROUP):
            return self._left[rank][1]
        return said

    def _note_left(self, ranks: list[RankFacts]) -> None:
        for rank in ranks:
            said = self._said.get(rank.rank)
            is_out = said is None or said.unknown == NO_GROUP or said is self._left.get(rank.rank, (None, None))[1]
            rank.left = self._left[rank.rank][0] if rank.rank in self._left and is_out else ""

    def _places(self) -> Stacks:
        found, devices = Stacks(), self.run.devices
        for rank, (state, returned) in enumerate(zip(self.run.states, self.run.returned, strict=True)):
            frames: list[Frame] = []
            deep, other = ([], []) if rank in self._stale else self._threads.get(rank, ([], []))
            if state == "idle":
                note = "has no part in the cell"
            elif returned:
                note = "has run the cell to its end" if self._is_cell else "has returned"
            elif state in ("failed", "stopped", "ended"):
                note = f"has ended ({state})"
            else:
                frames = deep or parse(self._texts.get(rank, ""))
                note = "is still starting" if state in ("queued", "starting") else "did not answer"
            said, cells, device = self.last_said(rank), self.run.cells, devices[rank]
            in_call = said is not None and any(not Call(*call).done for call in said.calls)
            in_thread = RankStack(rank, other, cells, "", None, device, in_call) if other and frames else None
            found.append(RankStack(rank, frames, cells, note, in_thread, device, in_call))
        return found

    # What the run asks

    def is_querying(self, silent_s: float) -> bool:
        """Return whether answers may still come. Asks anew if a rank has made progress since the last question."""
        now_s = time.monotonic()
        if self._why_asked_s is None or self._why_asked_s < now_s - silent_s:
            self._why_asked_s = now_s
            self.ask()
            return True
        return not self.have_come()

    def explain_silence(self, stall_s: float, first_silent: int) -> Diagnosis:
        """Return the diagnosis of a hang."""
        stacks = self._places()
        return diagnose_hang(stacks, stall_s, first_silent, self._missed or self._explain(stacks))

    def add_facts(self, ranks: list[RankFacts]) -> None:
        """Fill in what ranks have called, and where they raised, crashed, or were ended after another had failed."""
        self._note_left(ranks)
        for rank in ranks:
            failure = rank.failure
            # The watchdog's thread is none of the user's.
            thread = "main" if was_aborted_by_watchdog(rank) else "current"
            frames = [Frame(*at) for at in failure.frames] if failure else parse(rank.crash, thread)
            text, came_s = self._last_words.get(rank.rank, ("", 0.0))
            is_answer = self._is_failure_asked and came_s >= self._asked_s
            if rank.ended_by_us and (is_answer or time.monotonic() < came_s + LAST_WORDS_S):
                frames = frames or parse(text)
            rank.stack = RankStack(rank.rank, frames, self.run.cells) if frames else None
            rank.called = RankCalls(rank.rank, self._calls_of(rank.rank), rank.stack.place if rank.stack else "")

    # Asking though you have not

    def look(self, silent_s: float) -> None:
        """Ask ranks where they are, though you have not.

        That is: after another has failed, before they are ended for it, because one that waits for a third would hear
        of its end only later; when one has gone and another may wait for it; and when no rank has logged anything for
        long.
        """
        run, self._silent_s = self.run, silent_s
        if (has_failed := "failed" in run.states) != self._has_failed:  # or all have been started again since
            self._has_failed, self._looking = has_failed, self._after_failure() if has_failed else self._watch()
        if silent_s < FIRST_STEP_S or run.recorded.names:
            self._no_first_step = ""
        next(self._looking, None)
        run.hang_notice = self._stuck_notice or self._no_first_step

    def _watch(self) -> Iterator[None]:
        """While no rank has failed."""
        asked: tuple[set[int], float] = set(), 0.0
        while True:
            gone, quiet_s = set(ledger.gone(self._facts())), self._longest_silence_s()
            if not gone or quiet_s < QUIET_S or self.run.stopping:
                asked = set(), 0.0
            elif gone != asked[0] or not asked[1] <= quiet_s < ASK_AGAIN * asked[1]:
                asked = gone, quiet_s
                yield from self._look_for_stuck()
            if self._is_first_step_overdue():
                yield from self._answers()
                self._no_first_step = f"no rank has logged or printed anything in {FIRST_STEP_S:g} s:\n{self.stacks()}"
            yield

    def _answers(self) -> Iterator[None]:
        """Ask, and wait for the answers."""
        self.ask()
        while not self.have_come():
            yield

    def _facts(self) -> list[RankFacts]:
        ranks: list[RankFacts] = [*self.run.rank_states]
        self._note_left(ranks)
        return ranks

    def _longest_silence_s(self) -> float:
        """Return for how long one of the ranks at work has logged and printed nothing."""
        now_s = time.monotonic()
        running = (rank for rank, state in enumerate(self.run.states) if state == "running")
        return max((now_s - self._heard_s.get(rank, now_s) for rank in running), default=0.0)

    def _look_for_stuck(self) -> Iterator[None]:
        """End the run if ranks wait for one that has gone, and do so still a little later."""
        self._stuck_notice = ""
        if (found := (yield from self._stuck())) is None:
            return
        again_s = time.monotonic() + ledger.CONFIRM_S
        while time.monotonic() < again_s:
            yield
        again = yield from self._stuck()
        if again is None or again[:2] != found[:2]:
            return
        if self._is_cell:  # its ranks keep what they hold; the user may interrupt it
            self._stuck_notice = again.headline
        else:
            self.run._state.end_for(again, time.monotonic())

    def _stuck(self) -> Generator[None, None, Diagnosis | None]:
        """Ask, and return the rank that others wait for and that can never come."""
        yield from self._answers()
        ranks = self._facts()
        for rank, called in zip(ranks, self._calls(self._places()), strict=True):
            rank.called = called
        return None if self.run.stopping else ledger.stuck(ranks)

    def _is_first_step_overdue(self) -> bool:
        run = self.run
        if self._no_first_step or self._silent_s < FIRST_STEP_S or run.recorded.names or run.stopping or self._is_cell:
            return False
        return {"running"} <= set(run.states) <= {"running", "finished"}

    def _after_failure(self) -> Iterator[None]:
        """Once one has failed. If all that is known is that somebody was not there, the answer of that one decides."""
        failed_s = time.monotonic()
        while time.monotonic() < failed_s + FAILED_S:
            yield
        self._is_failure_asked = True
        self.ask()
        while time.monotonic() < failed_s + ANSWER_S:
            failed = [r for r in self.run.rank_states if r.failure or (r.exit_code is not None and not r.returned)]
            is_evidence = all(is_only_evidence(r) or r.exit_code in ABORTED for r in failed)
            if is_evidence and not self.have_come():
                self.run._state.end_later(time.monotonic() + FAILED_S)
            yield
