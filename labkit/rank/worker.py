"""What the user's function gets as its first argument: which rank it is on, and how to log."""

from __future__ import annotations

import inspect
import math
import operator
import os
from collections.abc import Mapping
from numbers import Number
from typing import Any

import torch

from labkit.protocol import events
from labkit.protocol.job import RankInfo
from labkit.protocol.pages import help_hint
from labkit.protocol.text import printable
from labkit.rank.channels import Channel
from labkit.rank.log_batcher import LogBatcher, number
from labkit.rank.stop_agreement import StopAgreement


class Worker:
    """One rank's info in the run: what the launched function gets as its first argument."""

    rank: int
    """Global rank, 0 … world_size − 1."""
    local_rank: int
    """Rank within its machine."""
    world_size: int
    """Number of ranks."""
    device: torch.device
    """Where this rank computes: its GPU, or the CPU."""

    def __init__(
        self, info: RankInfo, device: torch.device, log: LogBatcher, channel: Channel, watches_nan: bool = False
    ) -> None:
        self.rank, self.local_rank, self.world_size = info.rank, info.local_rank, info.world_size
        self.device = device
        self._pid = os.getpid()
        self._log, self._channel = log, channel
        self._watches_nan = watches_nan
        self._stop_agreement = StopAgreement(channel, info.world_size)
        self._known_names: dict[tuple[str, ...], tuple[str, ...]] = {}
        """What `log` was given, and how that is written."""
        self._next_step = 0
        self._log_calls = 0

    def log(self, step: int | None = None, **values: Any) -> None:
        """Send named numbers to the notebook: `worker.log(loss=loss.item(), lr=lr)`.

        The step counts the calls made without `step=`. Two names mean something to the live view and the tables:
        `samples`, how many samples this rank used in the step, gives samples per second; `accuracy` has a column in
        the comparison.

        Raises TypeError for a value that is not one number, ValueError for a reserved name, OverflowError for a step
        beyond 64 bits, FloatingPointError for a NaN or Inf under `watch="nan"`, `labkit.Stopped` once the run was asked
        to stop, and RuntimeError in a process that the rank has started, a DataLoader's worker, say.
        """
        if os.getpid() != self._pid:
            self._channel.check_process("worker.log was called")
        if step is None:
            step = self._next_step
            self._next_step += 1
        elif type(step) is not int:
            step = self._whole_number(step)
        names = tuple(values)
        try:
            names = self._known_names[names]
        except KeyError:
            names = self._check_names(names)
        numbers = list(values.values())
        for value in numbers:
            if type(value) is not float:
                numbers = [v if type(v) is float else number(n, v, self.rank) for n, v in values.items()]
                break
        self._log.add(step, names, numbers)
        self._log_calls += 1
        if self._watches_nan:
            self._check_finite(step, names, numbers)
        if self._channel.stop_asked_s is not None:
            self._stop_agreement.check(self._log_calls)

    def expect(self, steps: int) -> None:
        """Say how many steps this rank will log in all, so that the live view can show progress and time left.

        Raises ValueError for none: a data set with fewer samples than a batch of all ranks needs trains nothing.
        """
        self._channel.check_process("worker.expect was called")
        steps = self._whole_number(steps)
        if steps < 1:
            raise ValueError(
                f"rank {self.rank} expects {steps} steps: with {self.world_size} ranks no whole batch is left for it. "
                "Launch fewer ranks, or use a smaller batch or more samples"
            )
        self._channel.send(events.Expect(self.rank, steps))

    @property
    def stopping(self) -> bool:
        """Whether the run was asked to stop. The next `log` may then raise `labkit.Stopped`."""
        return self._channel.stop_asked_s is not None

    def _check_finite(self, step: int, names: tuple[str, ...], values: list[float]) -> None:
        for name, value in zip(names, values, strict=True):
            if not math.isfinite(value):
                raise FloatingPointError(
                    f"{name} is {value} at step {step}: the run was launched with watch='nan'\n"
                    f"{help_hint('not_a_number')}"
                )

    def _whole_number(self, value: Any) -> int:
        try:
            return operator.index(value)
        except TypeError:
            raise TypeError(f"rank {self.rank}: a step is a whole number, got {value!r:.60}") from None

    def _check_names(self, names: tuple[str, ...]) -> tuple[str, ...]:
        if not names:
            raise TypeError(f"rank {self.rank}: worker.log() got nothing to log; name a value: worker.log(loss=…)")
        for name in names:
            if name in events.RESERVED_NAMES:
                raise ValueError(
                    f"rank {self.rank}: worker.log({name}=…): labkit fills in the column {name!r} itself; "
                    "choose another name"
                )
        self._known_names[names] = tuple(map(printable, names))
        return self._known_names[names]

    def __eq__(self, other: object) -> bool:
        # A function that was written for `mp.spawn` takes the rank where this is passed. `rank == 0` would then never
        # hold, and whatever rank 0 alone is to do would never be done. Arithmetic raises by itself.
        if isinstance(other, Number):
            raise TypeError(
                f"rank {self.rank}: this is the worker, not a number: the launched function's first parameter is the "
                "worker. Write worker.rank where its rank is meant"
            )
        return self is other

    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return f"Worker(rank={self.rank}, world_size={self.world_size}, device={str(self.device)!r})"

    def __reduce__(self) -> Any:
        raise TypeError("a worker belongs to its rank and cannot be sent elsewhere; use plain values instead")


def takes_worker(fn: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a function is to be called as `fn(worker, *args, **kwargs)`, or without the worker.

    The worker is the first parameter, whatever that is called. A function does without one if it takes no more than it
    is given, or if its first parameter has a default: `def main(args=None)`.
    """
    try:
        signature = inspect.signature(fn)
    except ValueError:  # some built-in functions do not say
        return True
    first = next(iter(signature.parameters.values()), None)
    if first is None or first.kind not in (first.POSITIONAL_ONLY, first.POSITIONAL_OR_KEYWORD, first.VAR_POSITIONAL):
        return False
    if first.name == "worker" or first.kind is first.VAR_POSITIONAL:
        return True
    can_take_it = first.default is first.empty and _binds(signature, None, *args, **kwargs)
    return can_take_it or not _binds(signature, *args, **kwargs)


def _binds(signature: inspect.Signature, /, *args: Any, **kwargs: Any) -> bool:
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True
