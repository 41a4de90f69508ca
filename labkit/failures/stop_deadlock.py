"""Whether ranks that were asked to stop are deadlocked: they wait for what cannot come.

Knows no process: it is given what ranks answered, so that every case can be tested without starting any.
"""

from __future__ import annotations

import pickle
from collections.abc import Set

from labkit.protocol.events import Attached, Event
from labkit.rank.waiting import KIND, Waits

# A stop is obeyed in `worker.log`, at a step that the ranks agree on, so a rank that computes, or waits for a disk or
# for the network, must be given time; one that is stuck in a collective will never log, and who pressed Stop watches.
#
# What does not work: a fixed patience, which a long step exceeds and a stuck rank sits out; silence, for a long step is
# silent; an idle processor, for a rank that reads a slow file is idle; stacks alone, for the others of that rank stand
# in a collective as those of a stuck one do; a pause so long as the run never made, for the first checkpoint is one.
#
# So ranks have a grace that follows from the run's own pace, and it is cut short by proof only: every rank that has not
# ended waits for what cannot come. That is, it is in a collective; or it waits for a thread of its own process, and has
# none; or it sleeps, in `time.sleep`, until after the grace. The ranks say so themselves (`waiting`), each time
# they are asked. An answer tells of one moment, and the ranks' moments differ; but if all have answered, are asked
# again, and no answer has changed, they all waited while the question was on its way, and nothing was left that could
# have woken any. The pause before the second question is in proportion to the time that the first answers took.
#
# Once a rank has used a GPU, a collective may wait for what is computed there, too, and an idle processor proves
# nothing. There the ranks say which collectives they are in, and to which they have come: a rank waits for what cannot
# come if none of its collectives can end, because to each another rank that waits itself has not come.
#
# What still fails, towards patience: ranks have all of the grace if one waits for what may come (a pipe, a poll of a
# file, `work.wait()` on an operation of its own), cannot answer (native code holds the GIL), or waits for its GPU
# (`loss.item()`, a backward pass), which may have a computation before it or a collective. Towards haste: a signal
# handler that wakes a main thread which waits for no other; a network between machines that is silent for the engine's
# `quiet_s` with data on its way.

PAUSE_S = 0.02
"""Least time between ranks' answers and the next question."""

USED_SHARE = 0.02
"""Of a core: a rank that uses more between two answers is at work. Of one that only waited, labkit's own threads were
seen to use a sixth of that."""


class StopDeadlock:
    """Whether the ranks of one run that were asked to stop are deadlocked, by what they have answered since.

    Times are of one clock, in s.
    """

    def __init__(self, now: float, quiet_s: float = 0.0) -> None:
        self._began_s = self._asked_s = now
        self._quiet_s = quiet_s
        self._answers: dict[int, tuple[float, Waits]] = {}
        """Each rank's last, and when it came."""
        self._since_s: dict[int, float] = {}
        """When the first came of those that tell of the same wait."""
        self._again_s = float("inf")
        self._heard_since: set[int] = set()

    def take(self, event: Event, now: float) -> None:
        """Note an event, if it is an answer."""
        if not isinstance(event, Attached) or event.kind != KIND:
            return
        answer = Waits(*pickle.loads(event.blob))
        before = self._answers.get(answer.rank)
        if before is None or not _same_wait(before[1], answer, now - before[0]):
            self._since_s[answer.rank] = now
        self._answers[answer.rank] = now, answer
        self._heard_since.add(answer.rank)

    def ask_again(self, living: Set[int], now: float) -> bool:
        """Whether it is time to ask once more: all that have not ended have answered, some time ago."""
        if not living or not living <= self._heard_since:
            return False
        if self._again_s == float("inf"):
            # Longer and longer, so that ranks which take their time are asked a few dozen times at most.
            self._again_s = now + max(PAUSE_S, 2 * (now - self._asked_s), (now - self._began_s) / 4)
        if now < self._again_s:
            return False
        self._asked_s, self._again_s, self._heard_since = now, float("inf"), set()
        return True

    def is_proven(self, living: Set[int], end_s: float, now: float) -> bool:
        """Whether none of the ranks that have not ended can return anything by `end_s`."""
        if not living or not living <= self._heard_since:
            return False
        return all(self._waits(rank, living, end_s, now) for rank in living)

    def _waits(self, rank: int, living: Set[int], end_s: float, now: float) -> bool:
        heard_s, answer = self._answers[rank]
        if self._since_s[rank] >= self._asked_s:
            return False  # told once only
        if answer.what == "time":
            return heard_s + answer.left_s > end_s
        if answer.what == "call" and not self._are_missed(answer, living):
            return False
        return answer.what in ("ranks", "call", "nobody") and now - self._since_s[rank] >= self._quiet_s

    def _are_missed(self, answer: Waits, living: Set[int]) -> bool:
        """Whether the rank is in collectives, to each of which another that has not ended has not come."""
        reached = {other: dict(self._answers[other][1].reached) for other in living - {answer.rank}}
        return bool(answer.pending) and all(
            any(reached[other].get(group, number) < number for other in members if other in reached)
            for group, number, members in answer.pending
        )


def _same_wait(before: Waits, now: Waits, apart_s: float) -> bool:
    used_s = now.used_s - before.used_s
    return (before.what, before.at) == (now.what, now.at) and (now.what == "time" or used_s <= USED_SHARE * apart_s)
