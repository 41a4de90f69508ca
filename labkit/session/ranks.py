"""What is known of a session's ranks, and how it is put into words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from labkit.failures.grouping import rank_list


class Replaced(NamedTuple):
    """A rank whose process has ended, and that has a new one."""

    rank: int
    how: str
    """Its process ended: "SIGKILL", "exit code 3"; "" if it was ended with a run."""


class ReservedRank(NamedTuple):
    """One rank of a session, as it is now."""

    rank: int
    state: str
    """As `Run.states` has it; "idle" while no job is on it."""
    where: str
    """Its process."""


def replaced_in_words(new: Sequence[Replaced]) -> str:
    """Return which ranks are new, and why: "rank 1 is new (its process had ended: SIGKILL)"."""
    is_one = len(new) == 1
    how = "; ".join(dict.fromkeys(each.how for each in new if each.how))
    ended = f"ended: {how}" if how else f"been ended with {'its' if is_one else 'their'} run"
    whose = f"{'its' if is_one else 'their'} process had {ended}"
    return f"{rank_list([each.rank for each in new])} {'is' if is_one else 'are'} new ({whose})"


def lost_in_words(ranks: Sequence[int]) -> str:
    """Return what it costs that these ranks were lost: "rank 1 is replaced: its variables are gone"."""
    return f"{rank_list(list(ranks))} {'is' if len(ranks) == 1 else 'are'} replaced: {variables_gone(ranks)}"


def variables_gone(ranks: Sequence[int]) -> str:
    """Return that ranks which are new have no variables."""
    return "its variables are gone" if len(ranks) == 1 else "their variables are gone"
