"""Why a run was ended that no rank ended by failing: for its silence, or by an error of labkit's own."""

from __future__ import annotations

from labkit.failures.facts import Diagnosis, RankFacts
from labkit.failures.first_to_fail import others


def diagnose_silence(silent_s: float, first_silent: int, ranks: list[RankFacts]) -> Diagnosis:
    """Say that a run is ended because it has made no progress. Blames the first to fall silent."""
    headline = f"no rank logged, printed or returned anything for {silent_s:g} s (timeout_s)"
    cause = f"Rank {first_silent} was the first to fall silent. Give a longer timeout_s if such silence is expected."
    return Diagnosis(first_silent, headline, cause, others(ranks, first_silent), "hang")


def diagnose_own_error(error: BaseException, trace: str, folder: str, not_ended: str = "") -> Diagnosis:
    """Say that labkit itself could not go on: no rank is to blame.

    `folder` is the run directory of ranks that go on without the notebook, "" where they have been ended; `not_ended`
    says why they could not be.
    """
    after = "The ranks were ended, for nobody follows them any longer. What had come from them is kept."
    if not_ended:
        after = f"The ranks could not be ended ({not_ended}): `run.pids` are their processes. What had come is kept."
    if folder:
        after = (
            f"The ranks may still be at work. Once the cause is mended, labkit.attach({folder!r}) follows them again."
        )
    headline = f"labkit could not follow the ranks any longer: {type(error).__name__}: {error}"
    return Diagnosis(None, headline.splitlines()[0][:500], f"{after}\n\n{trace}".rstrip(), [], "labkit_failed")
