"""What the ranks of one run have said of their collectives, and what it explains."""

from __future__ import annotations

import pickle
from collections.abc import Collection

from labkit.monitor.diagnosis import Finding, RankFacts
from labkit.plugins.collectives import mismatch
from labkit.plugins.collectives.hooks import KIND
from labkit.plugins.collectives.missed import RankCalls, find
from labkit.plugins.collectives.recorder import Collectives
from labkit.plugins.stacks.hang import Missed
from labkit.plugins.stacks.question import Explaining
from labkit.plugins.stacks.rank_stacks import Stacks
from labkit.protocol.events import Attached, Event


class Calls(Explaining):
    """Beside a run: the newest that each rank has said."""

    title = "observer of collectives"

    def __init__(self) -> None:
        self._said: dict[int, Collectives] = {}

    def take(self, event: Event) -> None:
        """Note what a rank says."""
        if isinstance(event, Attached) and event.kind == KIND:
            self._said[event.rank] = Collectives(*pickle.loads(event.blob))

    def ask(self, ranks: Collection[int]) -> None:
        """Forget what these ranks have said: they are being asked again."""
        for rank in ranks:
            self._said.pop(rank, None)

    def explain_wait(self, stacks: Stacks) -> Missed:
        """Return in which call ranks missed each other."""
        return find([RankCalls(at.rank, self._said.get(at.rank), at.place, at.in_words) for at in stacks])

    def explain_failure(self, culprit: RankFacts, cause: str, ranks: list[RankFacts]) -> Finding | None:
        """Return what collectives that do not fit, or one that was missed, say of a failure."""
        calls = [RankCalls(r.rank, self._said.get(r.rank), r.stack.place if r.stack else "") for r in ranks]
        return mismatch.explain(culprit, cause, ranks, calls)
