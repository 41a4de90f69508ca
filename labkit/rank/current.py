"""The worker of the rank that this process is, for code to which nobody passes it: `labkit.current()`, `labkit.log(…)`.

Outside labkit there is one, too, so that a script that logs runs as ever: under torchrun it knows its rank, and what it
logs goes nowhere.
"""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from labkit.rank.worker import Worker

_now: Worker | None = None

_OF_A_RANK = "LABKIT_RANK_PID"
"""In a rank's environment, and thus in that of the processes that it starts: its process."""


@contextlib.contextmanager
def is_now(worker: Worker) -> Iterator[None]:
    """Have this worker be the current one."""
    global _now
    before, _now = _now, worker
    os.environ[_OF_A_RANK] = str(os.getpid())
    try:
        yield
    finally:
        _now = before
        os.environ.pop(_OF_A_RANK, None)


def current() -> Worker:
    """Return the worker of the rank that this process is, from anywhere in a launched function or script.

    In a process that labkit has not launched, one whose `rank`, `local_rank` and `world_size` are those of the
    environment, as torchrun sets them (0, 0 and 1 by default), and whose `log` and `expect` do nothing. So
    `train(labkit.current())` in a cell calls a training function in the notebook's own process, where `%debug` works;
    there is no process group.
    """
    return _now if _now is not None else _outside()


def log(step: int | None = None, **values: Any) -> None:
    """Send named numbers to the notebook, as `worker.log` does; outside labkit, do nothing.

    Args:
        step: counts the calls made without it.
        values: one number each: `labkit.log(loss=loss.item())`.

    Raises:
        TypeError, ValueError, FloatingPointError, Stopped, RuntimeError: as `labkit.Worker.log` does, under labkit.
    """
    current().log(step, **values)


def number_in(variable: str, default: int) -> int:
    """Return the number that a variable of the environment holds, or the default."""
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() else default


class OutsideWorker(Worker):
    """A worker of a process that labkit has not launched."""

    def __init__(self) -> None:
        self.rank, self.local_rank = number_in("RANK", 0), number_in("LOCAL_RANK", 0)
        self.world_size = number_in("WORLD_SIZE", 1)

    @functools.cached_property
    def device(self) -> torch.device:  # type: ignore[override]
        """Return where a script of this rank computes: its GPU, if there is one for every rank of this machine.

        Warns where there are fewer: that is the CPU, also where each process is shown a GPU of its own.
        """
        ranks = max(number_in("LOCAL_WORLD_SIZE", 1), self.local_rank + 1)
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if 0 < gpus < ranks:
            warnings.warn(
                f"rank {self.rank}: {ranks} ranks of this machine, and this one sees {gpus} of its GPUs, so that "
                "labkit.current().device is the CPU. If that GPU is this rank's alone (srun --gpus-per-task=1), start "
                "it with LOCAL_RANK=0 and LOCAL_WORLD_SIZE=1",
                stacklevel=3,
            )
        return torch.device("cuda", self.local_rank) if gpus >= ranks else torch.device("cpu")

    def log(self, step: int | None = None, **values: Any) -> None:
        """Do nothing."""
        if _OF_A_RANK in os.environ:
            _say_once_that_it_is_not_logged()

    def expect(self, steps: int) -> None:
        """Do nothing."""

    @property
    def stopping(self) -> bool:
        """Whether the run was asked to stop: there is none."""
        return False


@functools.cache
def _outside() -> Worker:
    return OutsideWorker()


@functools.cache
def _say_once_that_it_is_not_logged() -> None:
    warnings.warn(
        f"labkit.log in a process that a rank has started (the rank is process {os.environ[_OF_A_RANK]}): the notebook "
        "does not get it. Log in the rank, or hand the value to it",
        stacklevel=4,
    )
