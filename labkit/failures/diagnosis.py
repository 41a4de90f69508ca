"""The diagnosis of a run that labkit ended: because it made no progress, or because of an error of labkit's own."""

from __future__ import annotations

from labkit.failures.facts import Diagnosis
from labkit.failures.grouping import in_lines, rank_list
from labkit.failures.missed import NOTHING_MISSED, Missed
from labkit.failures.stacks import Stacks


def diagnose_hang(stacks: Stacks, silent_s: float, first_silent: int, missed: Missed = NOTHING_MISSED) -> Diagnosis:
    """Return the diagnosis of a run that has made no progress.

    It blames the rank that differs from the others, by its collectives or else by its stack. If there is none, it
    blames the rank that fell silent first.

    Args:
        stacks: Where every rank is.
        silent_s: How long no rank has made progress, in seconds.
        first_silent: The rank that made progress least recently.
        missed: The collective in which ranks missed each other, if that is known.
    """
    apart = missed.blamed or [rank for rank in stacks.outliers if rank in missed.concerned or not missed.concerned]
    if missed.concerned and first_silent not in missed.concerned:
        first_silent = missed.concerned[0]
    blamed = apart[0] if apart else first_silent
    where = missed.text or stacks.in_words
    headline = f"no rank logged, printed or returned anything for {silent_s:g} s (stall_s)"
    if apart:
        it = "it" if len(apart) == 1 else "them"
        hint = f"{rank_list(apart).capitalize()} stood apart: the others may be waiting for {it}."
    elif missed.text:
        hint = "The calls alone do not say which rank is wrong."
    else:
        hint = f"No rank stood apart; rank {first_silent} was the first to fall silent."
    advice = f"{hint} Give a longer stall_s if such silence is expected."
    cause = "\n\n".join(filter(None, [advice, missed.unknown, *stacks.blocks()]))
    elsewhere = in_lines({s.rank: s.in_words for s in stacks if s.rank != blamed})
    return Diagnosis(blamed, ": ".join(filter(None, [headline, where])), cause, elsewhere, "hang")


def diagnose_own_error(error: BaseException, trace: str, folder: str) -> Diagnosis:
    """Return the diagnosis of a run that labkit itself could not continue. No rank is to blame.

    Args:
        error: What labkit raised.
        trace: Its traceback.
        folder: The run directory, if the ranks go on without the notebook; else "".
    """
    after = "The ranks were ended, because nobody follows them any more. What had come from them is kept."
    if folder:
        after = (
            f"The ranks may still be at work. Once the cause is fixed, labkit.attach({folder!r}) follows them again."
        )
    headline = f"labkit lost track of the ranks: {type(error).__name__}: {error}"
    return Diagnosis(None, headline.splitlines()[0][:500], f"{after}\n\n{trace}".rstrip(), [], "labkit_failed")
