"""What is known of a run and of each of its ranks: events in, state out. No process, no thread, no clock."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from labkit.failures.facts import Diagnosis, RankFacts
from labkit.monitor.history import History
from labkit.monitor.output import RankOutput
from labkit.protocol import events
from labkit.protocol.packing import unpack

RETURN_GRACE_S = 10.0
"""How long a rank may take to end its process after its function has returned."""


@dataclass
class RankState(RankFacts):
    """What is known of one rank."""

    phase: str = "starting"
    """ "queued", "starting", "running", "finished", "failed", "stopped", "ended" (not by itself), or "idle": it has no
    part in a cell."""
    result: Any = None
    """What the function returned; None before, and an exception where the notebook cannot load it."""
    expected_steps: int = 0
    """As the rank says, from its first logged step on; 0 if it has not said."""
    steps_before: int = 0
    """Log calls that are kept of it from before it was started again."""
    device: str = ""
    """Where it computes; "" before it has said."""
    device_note: str = ""
    """Why that is not a GPU of its own though there are GPUs."""
    peak_device_bytes: int = 0
    """Peak memory that PyTorch allocated on the rank's GPU; 0 on CPU."""
    output: RankOutput = field(default_factory=RankOutput)
    began_s: float = 0.0
    """When its function began, or began again, since the launch."""
    printed_s: float = 0.0
    """When its function last printed, since the launch; 0 before."""
    attached: dict[str, bytes] = field(default_factory=dict)
    """What it has sent besides, by kind: its variables when it failed, its trace."""
    begins_again: bool = False
    """Whether it has been started again, and has not logged since."""

    @property
    def is_at_work(self) -> bool:
        """Whether it has neither ended nor said how its function ended."""
        return self.exit_code is None and self.phase in ("starting", "running")


class RunState:
    """What is known of a run. `take` changes it by one event; nothing else does but the run's own question to stop.

    Times called `now_s` are of one clock that never goes back; `since_launch_s` is the wall clock's.
    """

    def __init__(self, world_size: int, failure_grace_s: float, now_s: float) -> None:
        self.ranks = [RankState(rank) for rank in range(world_size)]
        self.recorded = History(world_size)
        """What was logged, in the form that charts draw."""
        self.notice = ""
        """What the launcher says of all of them."""
        self.warned: dict[tuple[int, str], str] = {}
        """What went wrong without ending the run, by rank (-1: of all) and topic."""
        self.attempt = 0
        """How often all ranks have been started again."""
        self.ended: Diagnosis | None = None
        """Why the launcher has ended them, if for a reason that is no rank's own."""
        self.decided: Diagnosis | None = None
        """Why labkit itself has ended them: they hang."""
        self.has_failed = False
        """Whether a rank has failed for another reason than that the run was asked to stop."""
        self.stop_asked = False
        self.progress_s = now_s
        """When a rank last logged, printed, started or returned."""
        self.end_by_s = float("inf")
        """When what is left of the ranks is to be ended: a while after the first has failed, or all have returned."""
        self._failure_grace_s = failure_grace_s

    @property
    def said(self) -> str:
        """What there is to say of all ranks: the notice, in its first line with what went wrong."""
        first, newline, rest = self.notice.partition("\n")
        return " · ".join(filter(None, (first, *self.warnings))) + newline + rest

    @property
    def warnings(self) -> list[str]:
        """What went wrong without ending the run, a line each."""
        return [text for _, text in sorted(self.warned.items()) if text]

    @property
    def is_over(self) -> bool:
        """Whether every rank has ended, or done its part."""
        return all(rank.exit_code is not None for rank in self.ranks)

    @property
    def is_queued(self) -> bool:
        """Whether ranks wait for machines."""
        return any(rank.phase == "queued" for rank in self.ranks)

    @property
    def placement(self) -> str:
        """What is special about where the ranks compute: that they share a GPU, or why they have none."""
        ranks_on = Counter(rank.device for rank in self.ranks if rank.device not in ("", "cpu"))
        shared = [f"{count} ranks share {device}" for device, count in sorted(ranks_on.items()) if count > 1]
        notes = [rank.device_note for rank in self.ranks if rank.device_note]
        if shared and notes:
            return f"{', '.join(shared)} ({notes[0]})"
        return ", ".join(shared or notes[:1])

    @property
    def at_work(self) -> set[int]:
        """The ranks that may still do something."""
        return {number for number, rank in enumerate(self.ranks) if rank.is_at_work}

    def end_all(self) -> None:
        """Note that ranks whose end nobody has seen were ended."""
        for rank in self.ranks:
            if rank.exit_code is None and rank.phase in ("queued", "starting", "running"):
                rank.phase = "ended"

    def end_for(self, why: Diagnosis, now_s: float) -> None:
        """Have the ranks ended now, because they cannot go on. Whatever becomes of them then is a consequence."""
        self.decided, self.has_failed, self.end_by_s = why, True, now_s

    def end_later(self, by_s: float) -> None:
        """Give ranks that are to be ended until then."""
        if self.end_by_s < float("inf"):
            self.end_by_s = max(self.end_by_s, by_s)

    def note_ended(self, rank: int, headline: str, cause: str, page: str) -> None:
        """Note that the launcher has ended them; `rank` is the one that it happened to, or -1."""
        self.ended = Diagnosis(rank if rank >= 0 else None, headline, cause, [], page)

    def take(self, event: events.Event, now_s: float, since_launch_s: float, ended_by_us: bool = False) -> None:
        """Note what an event says, and when it happened.

        `ended_by_us` is whether the run had ended the rank, for an `Exit`.
        """
        rank = self.ranks[event.rank]  # -1, of events that are no rank's: not used then
        match event:
            case events.Log():  # first: of these there are the most
                self._take_log(event, now_s)
            case events.Change():
                event.change(self, now_s)
            case events.Result():
                self._take_result(event, now_s, since_launch_s)
            case events.Failure():
                self._take_failure(event, now_s)
            case events.Exit():
                self._take_exit(event, now_s, since_launch_s, ended_by_us)
            case events.Started():
                rank.phase = "running"
                rank.device, rank.device_note = event.device, event.note
                rank.began_s = since_launch_s
                self.progress_s = now_s
            case events.Output():
                rank.output.add(event.text)
                if rank.phase == "running":  # before that, what a library repeats while it waits for others
                    rank.printed_s, self.progress_s = since_launch_s, now_s
            case events.Expect():
                rank.expected_steps = event.steps
            case events.Stopped():
                rank.phase = "stopped"
            case events.Memory():
                rank.peak_bytes, rank.peak_device_bytes = event.peak_bytes, event.peak_device_bytes
            case events.Warned():  # the newest of each topic
                self.warned[event.rank, event.topic] = event.text
            case events.Attached():
                rank.attached[event.kind] = event.blob

    def _take_log(self, log: events.Log, now_s: float) -> None:
        rank = self.ranks[log.rank]
        if not len(log.steps) == len(log.times_s) == len(log.values) / max(1, len(log.names)):
            raise ValueError(f"rank {log.rank} has sent log calls that cannot be told apart: {log!r:.500}")
        if rank.begins_again:
            rank.begins_again = False
            self.recorded.go_back(log.rank, log.steps[0])
            rank.steps_before = self.recorded.progress(log.rank).steps
        self.recorded.add(log)
        self.progress_s = now_s

    def _take_result(self, event: events.Result, now_s: float, since_launch_s: float) -> None:
        self.progress_s = now_s
        rank = self.ranks[event.rank]
        rank.result = self._load(event)
        rank.returned, rank.returned_s, rank.phase = True, since_launch_s, "finished"
        if all(rank.returned for rank in self.ranks):
            self.end_by_s = min(self.end_by_s, now_s + RETURN_GRACE_S)

    def _load(self, event: events.Result) -> Any:
        """Return what a rank returned; where that cannot be loaded, the exception, whose `load()` tries again."""
        load = functools.partial(unpack, event.value, "cpu")
        try:
            return load()
        except (Exception, SystemExit) as error:  # importing what it needs may end in either
            why = f"{type(error).__name__}: {error}".partition("\n")[0]
            self.warned[event.rank, "result"] = (
                f"rank {event.rank}'s result could not be loaded here: {why:.500}. Once the cause is fixed, "
                f"run.results[{event.rank}].load() returns it"
            )
            unloaded: Any = error.with_traceback(None)
            unloaded.load = load
            return unloaded

    def _take_failure(self, failure: events.Failure, now_s: float) -> None:
        self.ranks[failure.rank].failure = failure
        self._note_failed(failure.rank, now_s)

    def _take_exit(self, event: events.Exit, now_s: float, since_launch_s: float, ended_by_us: bool) -> None:
        rank = self.ranks[event.rank]
        rank.exit_code, rank.out_of_memory, rank.unseen = event.code, event.out_of_memory, event.unseen
        rank.ended_by_us, rank.exit_s = ended_by_us, since_launch_s
        rank.output.end()
        if rank.phase in ("queued", "starting", "running", "failed"):
            if not ended_by_us:
                self._note_failed(event.rank, now_s)
            elif rank.phase != "failed" or not self.has_failed:  # as the others ended: a consequence
                rank.phase = "ended"

    def _note_failed(self, rank: int, now_s: float) -> None:
        # From the last failure, and from the end of each that has failed: only then who waits for it can know and fail,
        # one after the other, and the last to say what it waits for may be the one that is to blame. Where others see
        # to that, what is decided here stands: a rank that fails as it is ended is no reason to let the rest go on.
        if self._failure_grace_s < float("inf"):
            self.end_by_s = now_s + self._failure_grace_s
        is_consequence = self.decided is not None and rank != self.decided.rank
        self.ranks[rank].phase = "ended" if is_consequence else "failed"
        # A rank that fails after the run was asked to stop is a consequence of stopping.
        self.has_failed = self.has_failed or not self.stop_asked
