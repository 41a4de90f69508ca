"""The root cause: which rank failed first, and why, where within milliseconds all of them fail.

    first_to_fail   from what the ranks reported, and how they ended, to one readable answer; why that is not simple
    exits           exit codes in words
    memory          whether a rank that was killed had run out of memory

Without it, the first rank that told of a failure is named.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from labkit.monitor.companion import Asked, Companion
    from labkit.monitor.diagnosis import Diagnosis, Explanation, RankFacts


def companion(asked: Asked) -> Companion:
    """Return what looks at the ranks' memory."""
    from labkit.plugins.root_cause.memory import Memory

    return Memory()


def diagnose(ranks: list[RankFacts], explanations: Iterable[Explanation]) -> Diagnosis:
    """Return which rank of a run that failed was the first to fail, why, and what became of the others."""
    from labkit.plugins.root_cause import first_to_fail

    return first_to_fail.diagnose(ranks, explanations)


def others(ranks: list[RankFacts], blamed: int | None) -> list[str]:
    """Return what became of the ranks that are not to blame for the end of their run, in lines."""
    from labkit.plugins.root_cause import first_to_fail

    return first_to_fail.others(ranks, blamed)
