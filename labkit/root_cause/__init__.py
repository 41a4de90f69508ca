"""The root cause: which rank failed first, and why, where within milliseconds all of them fail.

    first_to_fail   from what the ranks reported, and how they ended, to one readable answer; why that is not simple
    exits           exit codes in words

Without it, the first rank that told of a failure is named.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from labkit.monitor.diagnosis import Diagnosis, Explanation, RankFacts


def diagnose(ranks: list[RankFacts], explanations: Iterable[Explanation]) -> Diagnosis:
    """Return which rank of a run that failed was the first to fail, why, and what became of the others."""
    from labkit.root_cause import first_to_fail

    return first_to_fail.diagnose(ranks, explanations)


def outcome(rank: RankFacts) -> str:
    """Return what became of a rank that is not to blame for the end of its run."""
    from labkit.root_cause import first_to_fail

    return first_to_fail.outcome(rank)
