"""How an answer is tried: the function called on every rank, and what it did compared with what it should have done.

Runs in the ranks. A trial ends at the first thing that is wrong: after each case the ranks tell each other through the
store by which they met, so that none goes on while another has stopped.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from course.exercises.base import Exercise, find
from course.exercises.traffic import Event, Traffic, bounded_output, time_limit
from labkit.protocol.packed import Packed
from labkit.protocol.packing import unpack

if TYPE_CHECKING:
    from labkit import Worker

PATIENCE_S = 1.5
"""How long one may wait for another rank."""

LIMIT_S = 2 * PATIENCE_S
"""How long one call may take; longer than one wait, so that a wait is told as such."""

COMPUTING_S = PATIENCE_S
"""How long one call may compute, by the processor's clock: answers take milliseconds of it."""

Function = Callable[..., Any]


class Left(Exception):  # noqa: N818 - what the learner is told, and no error
    """The answer has called `exit()`, which would end a launched function well."""


class Wrong(Exception):  # noqa: N818 - what the learner is told, and no error
    """The answer is wrong: the message says what, where, and what was expected."""


class Finding(NamedTuple):
    """What is wrong, on one rank, in one case."""

    case: int
    rank: int
    message: str


class Report(NamedTuple):
    """What one rank saw of an answer."""

    finding: Finding | None
    cases: int
    """How many cases were tried to their end."""
    events: list[Event]
    """What the rank did in the last."""


class Trial:
    """What an exercise tries an answer with: `t.call(…)`, then `t.equal(…)` and `t.require(…)`."""

    def __init__(self, exercise: Exercise, function: Function, rank: int = 0, world_size: int = 1) -> None:
        self.exercise, self.function = exercise, function
        self.rank, self.world_size = rank, world_size
        self.case = 0
        self.limit_s, self.computing_s = LIMIT_S, COMPUTING_S
        self.traffic = Traffic(exercise.allowed, PATIENCE_S)

    def numbers(self, *shape: int, of: int | None = None, salt: str = "") -> torch.Tensor:
        """Return a rank's numbers (float32, whole, 1 … 99), the same wherever asked for; by default this rank's.

        Whole, so that sums are exact and messages short; never 0, so that what is missing is seen.
        """
        seed = zlib.crc32(repr((self.rank if of is None else of, self.world_size, self.case, shape, salt)).encode())
        return torch.randint(1, 100, shape, generator=torch.Generator().manual_seed(seed)).float()

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Call the answer, watched, and return what it returns."""
        return self.watch(lambda: self.function(*args, **kwargs))

    def watch(self, call: Callable[[], Any]) -> Any:
        """Have something count as the answer's own doing."""
        self.traffic.is_watched = True
        try:
            with time_limit(self.limit_s, self.computing_s), bounded_output():
                return call()
        finally:
            self.traffic.is_watched = False

    def fail(self, message: str) -> None:
        """End the trial."""
        raise Wrong(message)

    def require(self, condition: Any, message: str) -> None:
        """End the trial unless the condition holds."""
        if not condition:
            raise Wrong(message)

    def returned(self, found: Any, expected: str) -> None:
        """End the trial unless the answer has returned as many things as `expected` names: "(mean, variance)"."""
        is_right = isinstance(found, (tuple, list)) and len(found) == expected.count(",") + 1
        self.require(is_right, f"returned a {type(found).__name__}, expected {expected}")

    def reduced_once(self, why: str = "") -> None:
        """End the trial if the answer has called all_reduce more often than once."""
        calls = self.traffic.count("all_reduce")
        self.require(calls <= 1, f"called all_reduce {calls} times, expected once{why}")

    def equal(
        self,
        what: str,
        found: Any,
        expected: torch.Tensor,
        before: torch.Tensor | None = None,
        known: Mapping[str, torch.Tensor] | None = None,
        tolerance: float = 1e-5,
    ) -> None:
        """End the trial unless a tensor is as expected. `known` has what mistakes give, by what to say of them.

        Of mistakes that make no difference here nothing is said.
        """
        if not isinstance(found, torch.Tensor):
            raise Wrong(f"`{what}` is {_said(found)}, expected a tensor of shape {_shape(expected)}{_forgotten(found)}")
        if found.shape != expected.shape:
            raise Wrong(f"`{what}` has shape {_shape(found)}, expected {_shape(expected)}")
        if found.dtype != expected.dtype:
            raise Wrong(f"`{what}` holds {found.dtype}, expected {expected.dtype}")
        found = found.detach()
        if torch.allclose(found, expected, rtol=tolerance, atol=tolerance):
            return
        differs = ~torch.isclose(found, expected, rtol=tolerance, atol=tolerance)
        index = tuple(differs.nonzero()[0].tolist())
        place = f"{what}[{', '.join(map(str, index))}]" if index else what
        guess = _guess(found, expected, before, known or {}, self.world_size)
        raise Wrong(f"`{place}` is {found[index].item():.6g}, expected {expected[index].item():.6g}{guess}")

    def unchanged(self, what: str, now: torch.Tensor, before: torch.Tensor) -> None:
        """End the trial if an input was changed."""
        if not torch.equal(now, before):
            self.fail(f"`{what}` was changed; it is an input, and others may still need it")

    def same(self, what: str, found: Any, expected: Any) -> None:
        """End the trial unless a plain value is as expected."""
        if isinstance(found, (list, tuple)) and isinstance(expected, list):
            self._same_items(what, list(found), expected)
        elif found != expected:
            self.fail(f"`{what}` is {_said(found)}, expected {_said(expected)}{_forgotten(found)}")

    def _same_items(self, what: str, found: list[Any], expected: list[Any]) -> None:
        for index, (one, other) in enumerate(zip(found, expected, strict=False)):
            if one != other:
                self.fail(f"`{what}[{index}]` is {_said(one)}, expected {_said(other)}")
        if len(found) != len(expected):
            self.fail(f"`{what}` has {len(found)} entries, expected {len(expected)}")


def _said(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def _forgotten(value: Any) -> str:
    return ": no return?" if value is None else ""


def _shape(tensor: torch.Tensor) -> str:
    return str(tuple(tensor.shape))


def _is_near(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.allclose(one.to(other.dtype), other, rtol=1e-4, atol=1e-5)


def _guess(
    found: torch.Tensor,
    expected: torch.Tensor,
    before: torch.Tensor | None,
    known: Mapping[str, torch.Tensor],
    world_size: int,
) -> str:
    """Name the mistake, if it is a known one."""
    for said, wrong in known.items():
        # With one rank, say, most mistakes give what is expected.
        if wrong.shape == found.shape and _is_near(wrong, found) and not _is_near(wrong, expected):
            return f": {said}"
    if before is not None and before.shape == found.shape and torch.equal(found, before):
        return ": nothing has changed it"
    if not torch.isfinite(found).all():
        return ": not a finite number"
    nonzero = expected != 0
    if found.is_floating_point() and nonzero.any() and torch.equal(found != 0, nonzero):
        ratios = found[nonzero] / expected[nonzero]
        ratio = ratios.mean().item()
        if torch.allclose(ratios, ratios.mean(), rtol=1e-3) and 1e-3 < abs(ratio) < 1e3:
            if world_size > 1 and abs(ratio - world_size) < 1e-3 * world_size:
                return f", {ratio:.1f} times what it should be: summed, not averaged?"
            if world_size > 1 and abs(ratio * world_size - 1) < 1e-3:
                return f", {ratio:.3g} times what it should be: divided by the number of ranks once too often?"
            if len(ratios) > 1:  # of a single number it says nothing
                return f", {ratio:.3g} times what it should be"
    return ""


# On the ranks


class Meeting:
    """How the ranks of a trial tell each other how it goes, beside the answer's own communication."""

    def __init__(self, rank: int, world_size: int, patience_s: float) -> None:
        self.rank, self.world_size, self._patience_s = rank, world_size, patience_s
        self._store = dist.PrefixStore("labkit-trial", distributed_c10d._get_default_store())

    def say(self, case: int, said: dict[str, Any]) -> None:
        """Tell the others."""
        self._store.set(f"{case}/{self.rank}", json.dumps(said))

    def all_said(self, case: int) -> list[dict[str, Any]] | None:
        """Return what each rank says of a case, by rank; None if one does not say anything for long."""
        keys = [f"{case}/{rank}" for rank in range(self.world_size)]
        try:
            self._store.wait(keys, timedelta(seconds=self._patience_s))
            return [json.loads(text) for text in self._store.multi_get(keys)]
        except (RuntimeError, dist.DistStoreError):  # one hangs, or has gone
            return None


def be_there(worker: Any) -> None:
    """Do nothing: a rank that has done it has imported torch and has met the others."""


def examine(worker: Worker, exercise_name: str, packed: Packed, patience_s: float) -> Report:
    """Try an answer on this rank, case by case; return what was seen. What the answer raises goes on to the run."""
    exercise = find(exercise_name)
    assert exercise.try_out is not None
    traffic = Traffic(exercise.allowed, patience_s)
    meeting = Meeting(worker.rank, worker.world_size, patience_s + 0.5)
    with traffic.replacing_torchs_own():
        # Only now: what the learner has imported from torch.distributed by name is looked up here.
        function, _, _ = unpack(packed, worker.device)
        trial = Trial(exercise, function, worker.rank, worker.world_size)
        trial.traffic = traffic
        trial.limit_s, trial.computing_s = 2 * patience_s, min(patience_s, COMPUTING_S)
        for index, case in enumerate(exercise.cases):
            trial.case = index
            traffic.forget()
            finding = _try_case(trial, exercise.try_out, case, meeting)
            said = meeting.all_said(index)
            if finding or said is None or any(other["ended"] for other in said):
                return Report(Finding(index, worker.rank, finding) if finding else None, index, traffic.events)
            if lost := _lost_message(said):
                return Report(Finding(index, worker.rank, lost), index, traffic.events)
    return Report(None, len(exercise.cases), traffic.events)


def _try_case(trial: Trial, try_out: Callable[..., None], case: Mapping[str, Any], meeting: Meeting) -> str:
    """Return what is wrong, or ""."""
    finding, raised = "", True
    try:
        try:
            try_out(trial, **case)
            if unfinished := trial.traffic.unfinished:
                finding = f"returned with an {unfinished[0]} that nobody has waited for: call wait() on what it returns"
        except SystemExit as error:
            raise Left("exit()").with_traceback(error.__traceback__) from None
        except Wrong as wrong:
            finding = str(wrong)
            if unfinished := [what for what in trial.traffic.unfinished if not what.startswith("isend")]:
                finding += f" ({unfinished[0]} was never waited for)"
        raised = False
    finally:
        traffic = trial.traffic
        counts = {"sent": traffic.sent_to, "received": traffic.received_from}
        meeting.say(trial.case, {"ended": raised or bool(finding), **counts})
    return finding


def _lost_message(said: Sequence[Mapping[str, Any]]) -> str:
    for sender, theirs in enumerate(said):
        for receiver, others in enumerate(said):
            sent, received = theirs["sent"].get(str(receiver), 0), others["received"].get(str(sender), 0)
            if sent != received:
                return f"rank {sender} sent {sent} messages to rank {receiver}, which received {received} of them"
    return ""


def examine_here(exercise: Exercise, function: Function) -> Report:
    """Try an answer that needs no ranks, in this process. What the answer raises goes on."""
    assert exercise.try_out is not None
    trial = Trial(exercise, function)
    began_s = time.thread_time()
    for index, case in enumerate(exercise.cases):
        trial.case = index
        trial.computing_s = min(COMPUTING_S, max(0.01, 2 * COMPUTING_S - (time.thread_time() - began_s)))
        try:
            exercise.try_out(trial, **case)
        except Wrong as wrong:
            return Report(Finding(index, 0, str(wrong)), index, [])
    return Report(None, len(exercise.cases), [])
