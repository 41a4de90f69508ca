"""The observers of one run, and the one place that calls them: one that raises is switched off, and the run goes on.

An observer is labkit's own: a mistake in it must neither end a training nor keep its end from being noticed. So it is
as with trio's Instruments: what it raises is logged, it is called no more, and the run's report says so.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Set
from typing import TYPE_CHECKING, Any, TypeVar

from labkit.failures.facts import Diagnosis, Finding, RankFacts
from labkit.monitor.companion import Companion
from labkit.protocol import events
from labkit.protocol.job import Job

if TYPE_CHECKING:
    from labkit.monitor.run import WorkerFailed

Kind = TypeVar("Kind", bound=Companion)
T = TypeVar("T")

logger = logging.getLogger("labkit")


class Observers(list[Companion]):
    """Those of one run that are not switched off. `Companion` says what each is asked, and when."""

    def __init__(self, observers: Iterable[Companion] = ()) -> None:
        super().__init__(observers)
        self.failed: list[str] = []
        """A sentence for each that was switched off."""
        self._changing = threading.Lock()

    def each(self, kind: type[Kind], call: Callable[[Kind], T]) -> list[T]:
        """Return what a call gives for each observer of a class, without those that raise: they are switched off."""
        return [found for observer in self.copy() if isinstance(observer, kind) for found in self._ask(observer, call)]

    def _all(self, call: Callable[[Companion], T]) -> list[T]:
        return self.each(Companion, call)

    def _ask(
        self, observer: Kind, call: Callable[[Kind], T], passed_on: type[BaseException] = KeyboardInterrupt
    ) -> list[T]:
        """Return what a call gives in a list, which is empty if it raises."""
        try:
            return [call(observer)]
        except (KeyboardInterrupt, passed_on):  # the first is for whoever waits, in whose thread some are called
            raise
        except BaseException as error:
            self._switch_off(observer, error)
            return []

    def _switch_off(self, observer: Companion, error: BaseException) -> None:
        with self._changing:
            if all(each is not observer for each in self):
                return  # it has failed in another thread, too
            self[:] = [each for each in self if each is not observer]
            said = (
                f"labkit's own {observer.title} failed and was switched off; the run goes on without it: "
                f"{type(error).__name__}: {error}".rstrip(" :")
            )
            self.failed.append(said)
        logger.error("%s", said, exc_info=error)

    def first(self, kind: type[Kind]) -> Kind | None:
        """Return the first observer of a class, or None."""
        return next((each for each in self if isinstance(each, kind)), None)

    # What all are asked

    def begin(self, job: Job) -> Job:
        """Return the run's job as it is to be. Raises TimeoutError where an observer keeps the run from starting."""
        for observer in self.copy():
            changed = self._ask(observer, functools.partial(_begin, job), passed_on=TimeoutError)
            job = changed[0] if changed else job
        return job

    @contextlib.contextmanager
    def showing(self) -> Iterator[None]:
        """Return a context in which `launch` shows the run, and waits for it."""
        entered: list[tuple[Companion, contextlib.AbstractContextManager[Any]]] = []

        def enter(observer: Companion) -> None:
            context = observer.showing()
            context.__enter__()
            entered.append((observer, context))

        self._all(enter)
        try:
            yield
        finally:
            for observer, context in reversed(entered):
                self._ask(observer, functools.partial(_leave, context))

    def take(self, event: events.Event) -> None:
        """Tell of an event."""
        self._all(lambda each: each.take(event))

    def look(self, silent_s: float) -> None:
        """Let them look what there is to do."""
        self._all(lambda each: each.look(silent_s))

    def attend(self) -> None:
        """Let them speak with whoever waits for the run, in whose thread this is called."""
        self._all(lambda each: each.attend())

    @property
    def holds_the_time(self) -> bool:
        """Whether `timeout_s` does not run just now."""
        return any(self._all(lambda each: bool(each.holds_the_time)))

    def asks_why(self, silent_s: float) -> bool:
        """Return whether silent ranks are being asked why."""
        return any(self._all(lambda each: bool(each.asks_why(silent_s))))

    def explain_silence(self, timeout_s: float, first_silent: int) -> Diagnosis | None:
        """Return the first that is found."""
        return _first(self._all(lambda each: _a(Diagnosis | None, each.explain_silence(timeout_s, first_silent))))

    def add_facts(self, ranks: list[RankFacts]) -> None:
        """Let them fill in what they know of ranks that have failed."""
        self._all(lambda each: each.add_facts(ranks))

    def explain_failure(self, culprit: RankFacts, cause: str, ranks: list[RankFacts]) -> Finding | None:
        """Return the first that is found."""
        return _first(self._all(lambda each: _finding(each.explain_failure(culprit, cause, ranks))))

    @property
    def grace_s(self) -> float:
        """How long ranks that are asked to stop have besides the engine's time, in s."""
        return sum(self._all(lambda each: float(each.grace_s)))

    def mind_the_stop(self, at_work: Set[int], end_s: float, now_s: float) -> bool:
        """Return whether no rank that is at work can return anything before its grace ends."""
        return any(self._all(lambda each: bool(each.mind_the_stop(at_work, end_s, now_s))))

    def add_to(self, error: WorkerFailed) -> list[tuple[str, str]]:
        """Return what is to be shown with the run's error, as text and as HTML."""
        return self._all(lambda each: _two_texts(each.add_to(error)))

    @property
    def notice(self) -> str:
        """What is to be shown with the run just now, those that were switched off included."""
        return "\n".join(filter(None, (*self._all(lambda each: _a(str, each.notice)), *self.failed)))

    @property
    def panel(self) -> Any:
        """The first widget that one of them has for the live view, or None."""
        return _first(self._all(lambda each: each.panel))


def _begin(job: Job, observer: Companion) -> Job:
    changed: Job = _a(Job, observer.begin(job))
    return changed


def _leave(context: contextlib.AbstractContextManager[Any], observer: Companion) -> None:
    context.__exit__(None, None, None)


# What an observer returns is checked while it is known which one it was


def _a(kind: Any, value: Any) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"it returned {value!r:.200}, not {getattr(kind, '__name__', kind)}")
    return value


def _finding(value: Any) -> Finding | None:
    if value is None:
        return None
    rank, headline, cause, page = value
    return _a(int, rank), _a(str, headline), _a(str, cause), _a(str, page)


def _two_texts(value: Any) -> tuple[str, str]:
    text, html = value
    return _a(str, text), _a(str, html)


def _first(found: list[Any]) -> Any:
    return next((each for each in found if each is not None), None)
