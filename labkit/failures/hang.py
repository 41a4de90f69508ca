"""What a run that makes no progress is ended with: where its ranks stand, and why they wait for each other.

Knows no process: it is given facts, so that every case can be tested without starting any.
"""

from __future__ import annotations

from typing import NamedTuple

from labkit.failures.facts import Diagnosis
from labkit.failures.grouping import in_lines, rank_list
from labkit.failures.stacks import Stacks


class Missed(NamedTuple):
    """Why ranks wait that wait for each other."""

    blamed: list[int]
    """The ranks that stand apart by it; empty if none does."""
    text: str
    """One line; "" if nothing was found."""
    unknown: str = ""
    """What could not be known, and why; "" if all was."""
    waiting: tuple[int, ...] = ()
    """The ranks that wait in the call, where it is one."""
    concerned: tuple[int, ...] = ()
    """The ranks of whom it says something: no other is to blame; empty if that is not known."""


NOTHING_MISSED = Missed([], "")


def diagnose_hang(stacks: Stacks, silent_s: float, first_silent: int, missed: Missed = NOTHING_MISSED) -> Diagnosis:
    """Return where the ranks of a run stand that has made no progress, and which collective they missed each other in.

    Blames who stands apart: by the collectives, else by the stacks; else the first silent.
    """
    apart = missed.blamed or [rank for rank in stacks.outliers if rank in missed.concerned or not missed.concerned]
    if missed.concerned and first_silent not in missed.concerned:
        first_silent = missed.concerned[0]
    blamed = apart[0] if apart else first_silent
    where = missed.text or stacks.in_words
    headline = f"no rank logged, printed or returned anything for {silent_s:g} s (timeout_s): {where}"
    hint = (
        f"{rank_list(apart).capitalize()} stood apart; the others may be waiting for what never comes."
        if apart
        else f"No rank stood apart; rank {first_silent} was the first to fall silent."
    )
    cause = "\n\n".join(
        [
            f"{hint} Give a longer timeout_s if such silence is expected.",
            *filter(None, [missed.unknown]),
            *stacks.blocks(),
        ]
    )
    others = in_lines({s.rank: s.in_words for s in stacks if s.rank != blamed})
    return Diagnosis(blamed, headline, cause, others, "hang")
