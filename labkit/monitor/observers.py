"""The observers of one run, and the one place that calls them: one that raises is switched off, and the run goes on.

An observer is labkit's own: a mistake in it must neither end a training nor keep its end from being noticed. So it is
as with trio's Instruments: what it raises is logged, it is called no more, and the run's report says so.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable
from typing import TypeVar

from labkit.failures.facts import RankFacts
from labkit.monitor.record import RunRecord
from labkit.protocol import events
from labkit.protocol.job import Job

Kind = TypeVar("Kind", bound="RunObserver")
T = TypeVar("T")

logger = logging.getLogger("labkit")


class RunObserver:
    """What observes one run in the notebook. Each method may be left as it is; all but `begin` hold the run's lock.

    Only `Observers` calls them.
    """

    title = "observer"
    """What it is, for the sentence that says that it was switched off."""
    run: RunRecord
    """Filled in when the run is made."""

    def begin(self, job: Job) -> Job:
        """Return the job of a run that is about to start, with what its ranks need: `job.with_hook(…)`, say."""
        return job

    def take(self, event: events.Event) -> None:
        """Note what an event says."""

    def look(self, silent_s: float) -> None:
        """Called periodically: no rank has logged, printed, begun or returned anything for so long."""

    def add_facts(self, ranks: list[RankFacts]) -> None:
        """Fill in what is known of the ranks of a run that has failed."""


class Observers(list[RunObserver]):
    """Those of one run that are not switched off."""

    def ask(self, observer: Kind, call: Callable[[Kind], T], otherwise: T) -> T:
        """Return what a call gives; `otherwise` if it raises, which switches the observer off, or if that is so."""
        if observer not in self:
            return otherwise
        try:
            return call(observer)
        except KeyboardInterrupt:  # for the thread that waits for the run, in which some are called
            raise
        except BaseException as error:
            self[:] = [each for each in self if each is not observer]
            said = (
                f"labkit's own {observer.title} failed and was switched off; the run goes on without it: "
                f"{type(error).__name__}: {error}".rstrip(" :")
            )
            observer.run._state.warned[-1, observer.title] = said
            logger.error("%s", said, exc_info=error)
            return otherwise

    def begin(self, job: Job) -> Job:
        """Return the job as it is to start."""
        for observer in self.copy():
            job = self.ask(observer, operator.methodcaller("begin", job), job)
        return job

    def tell(self, call: Callable[[RunObserver], object]) -> None:
        """Call a method of each."""
        for observer in self.copy():
            self.ask(observer, call, None)
