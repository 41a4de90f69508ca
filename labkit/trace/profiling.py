"""What a rank does in a step, and what that costs, for people who measure by hand: `labkit.profiling`.

`launch(…, trace=5)` and `labkit.compare` measure without a line in the training function.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from labkit.steps.counting import Activations as Activations
from labkit.steps.counting import size_bytes as size_bytes
from labkit.steps.counting import tensor_bytes as tensor_bytes
from labkit.system import host


class Mark(NamedTuple):
    """Something that a rank did, from when to when, in seconds since 1970."""

    what: str
    start_s: float
    end_s: float


class Clock:
    """Marks what a rank does: `with clock("forward"): …`. On a GPU it waits for the device at either end.

    The clock is the machine's, so that marks of several ranks on one machine can be drawn together.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.steps: list[list[Mark]] = []
        """The marks of each step; the first of each is the step as a whole."""
        self._marks: list[Mark] = []

    def now(self) -> float:
        """Return the time in seconds, once the device has done what it was given."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.time()

    @contextlib.contextmanager
    def __call__(self, what: str) -> Iterator[None]:
        """Mark what happens inside."""
        start_s = self.now()
        yield
        self._marks.append(Mark(what, start_s, self.now()))

    def timed(self, what: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that does the same and is marked."""

        @functools.wraps(call)
        def marked(*args: Any, **kwargs: Any) -> Any:
            with self(what):
                return call(*args, **kwargs)

        return marked

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Mark a whole step."""
        self._marks = []
        start_s = self.now()
        yield
        self.steps.append([Mark("step", start_s, self.now()), *self._marks])


def bytes_sent() -> float:
    """Bytes that this rank has sent over TCP connections that are still open, retransmissions excluded.

    What the system counted (Linux's TCP_INFO), gloo's own headers and the traffic with the rendezvous store included.
    NaN where nobody counts: on other systems, and with NCCL, which sends through NVLink, shared memory or InfiniBand.
    """
    if dist.is_initialized() and "nccl" in dist.get_backend():
        return float("nan")
    try:
        return host.bytes_sent()
    except OSError:
        return float("nan")
