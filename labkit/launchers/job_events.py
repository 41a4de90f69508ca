"""What the launcher reports of its ranks: that they wait for machines, begin again, or have been ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from labkit.protocol.events import Change

if TYPE_CHECKING:
    from labkit.monitor.state import RunState


@dataclass(frozen=True)
class Notice(Change):
    """What the launcher reports of all ranks."""

    text: str
    """One line; "" once there is no more to say."""
    queued: bool | None = False
    """Whether the ranks still wait for machines; None if that is not known."""

    def change(self, state: RunState, now_s: float) -> None:
        """Keep it, with the phases of ranks that wait, or no longer do."""
        state.notice, state.progress_s = self.text, now_s
        if self.queued and not state.is_queued:
            _forget_attempt(state, "queued")
        elif self.queued is False:
            for rank in state.ranks:
                rank.phase = "starting" if rank.phase == "queued" else rank.phase


@dataclass(frozen=True)
class Restarted(Change):
    """All ranks begin again; whatever they reported before is void, but what they logged is not."""

    attempt: int
    """0 is the first."""

    def change(self, state: RunState, now_s: float) -> None:
        """Forget how the ranks fared before."""
        state.attempt, state.progress_s = self.attempt, now_s
        for rank in state.ranks:
            rank.begins_again = True
        _forget_attempt(state, "starting")


@dataclass(frozen=True)
class StoppedElsewhere(Change):
    """Another notebook, or another `Run` of this one, has had the ranks stopped."""

    by: str
    """Which process, and when, as text."""

    def change(self, state: RunState, now_s: float) -> None:
        """Count the run as one that was to stop: what ranks do now is a consequence."""
        state.stop_asked = True
        state.warned[-1, "stopped"] = f"stopped {self.by}"


@dataclass(frozen=True)
class Absent(Change):
    """The rank has no part in what the others do: a cell for some of a session's ranks."""

    def change(self, state: RunState, now_s: float) -> None:
        """Count it among those that have ended."""
        state.ranks[self.rank].phase, state.ranks[self.rank].exit_code = "idle", 0


@dataclass(frozen=True)
class JobEnded(Change):
    """The launcher has ended the ranks, or let them end, for a reason that is no rank's own.

    `rank` is the one that it happened to, or -1.
    """

    headline: str
    cause: str
    """What is known of it, and what to do next."""
    page: str
    """As `labkit.explain` takes it."""

    def change(self, state: RunState, now_s: float) -> None:
        """Keep it for the run's error."""
        state.note_ended(self.rank, self.headline, self.cause, self.page)


def _forget_attempt(state: RunState, phase: str) -> None:
    """Forget how ranks fared before all of them began again; what they printed and used stays."""
    for rank in state.ranks:
        rank.phase, rank.result, rank.returned, rank.failure = phase, None, False, None
        rank.exit_code, rank.exit_s, rank.ended_by_us = None, float("inf"), False
        rank.out_of_memory, rank.unseen = "", False
    state.has_failed = False
