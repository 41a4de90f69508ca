"""What a plugin puts beside a run, in the notebook; `labkit.protocol.plugins` asks those that do."""

from __future__ import annotations

import contextlib
from collections.abc import Set
from typing import TYPE_CHECKING, Any

from labkit.engines.arguments import Asked
from labkit.failures.facts import Diagnosis, Finding, RankFacts
from labkit.protocol import events, plugins
from labkit.protocol.job import Job

if TYPE_CHECKING:
    from labkit.monitor.run import Run, WorkerFailed


class Companion:
    """Beside one run. Each method may be left as it is; those that hear of the run are called with its lock held.

    They are called by `labkit.monitor.observers` alone, which switches off one that raises.
    """

    title = "observer"
    """What it is, for the sentence that says so."""
    run: Run
    """Filled in by the run, when it is made."""
    holds_the_time = False
    """Whether `timeout_s` does not run just now: somebody is at a prompt, say."""
    panel: Any = None
    """A widget for the live view."""
    notice = ""
    """What is to be shown with the run just now."""

    def begin(self, job: Job) -> Job:
        """Return the run's job as it is to be, `job.with_hooks(…)` for its ranks, say. It is about to start.

        A TimeoutError keeps it from starting.
        """
        return job

    def showing(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which `launch` shows the run, and waits for it."""
        return contextlib.nullcontext()

    def take(self, event: events.Event) -> None:
        """Note what an event says."""

    def look(self, silent_s: float) -> None:
        """Look what there is to do. Called now and then: no rank has logged, printed, begun or returned anything for so
        long."""

    def asks_why(self, silent_s: float) -> bool:
        """Return whether ranks that have been silent for so long, and are to be ended for it, are being asked why."""
        return False

    def explain_silence(self, timeout_s: float, first_silent: int) -> Diagnosis | None:
        """Return what says more than that no rank has been heard of for `timeout_s`, and which fell silent first."""
        return None

    def add_facts(self, ranks: list[RankFacts]) -> None:
        """Fill in where ranks stood that have failed."""

    def explain_failure(self, culprit: RankFacts, cause: str, ranks: list[RankFacts]) -> Finding | None:
        """Return what says more than that the culprit was the first to fail; see `labkit.failures.diagnosis`."""
        return None

    @property
    def grace_s(self) -> float:
        """How long ranks that are asked to stop have at least, in s."""
        return 0.0

    def mind_the_stop(self, at_work: Set[int], end_s: float, now_s: float) -> bool:
        """Return whether no rank that is at work can return anything before its grace ends; it was asked to stop.

        Times are of `time.monotonic()`. Called now and then; may ask the ranks again, for the sake of their answers.
        """
        return False

    def add_to(self, error: WorkerFailed) -> tuple[str, str]:
        """Return what is to be shown with the run's error, as text and as HTML; "" for nothing."""
        return "", ""

    def attend(self) -> None:
        """Speak with whoever waits for the run, in whose thread this is called now and then."""


def companions(asked: Asked) -> list[Companion]:
    """Return what plugins put beside a run. Raises TypeError, ValueError or ModuleNotFoundError for what none can."""
    return [found for make in plugins.those_with("companion") if (found := make(asked)) is not None]
