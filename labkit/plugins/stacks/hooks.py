"""What a rank does for its collectives to be known."""

from __future__ import annotations

import contextlib
import functools
import pickle
import sys
import traceback
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from labkit.failures import recorder
from labkit.protocol.events import Attached
from labkit.protocol.job import Job, RankHooks
from labkit.rank.channels import Channel

KIND = "collectives"
"""What the notebook knows by it what a rank says."""

LEFT = "left"
"""What the notebook knows by it that a rank has left its process group: (file, line, function), most recent first."""

FRAMES = 20
"""Of the call by which it left, the most recent."""

_group: int | None = None
"""The number of the process group of the last job, if that stays from cell to cell."""


class SaysCalls(RankHooks):
    """Says which collectives the rank has called, when it is asked and when it fails."""

    def around(self, job: Job, channel: Channel) -> contextlib.AbstractContextManager[None]:
        """Forget what earlier jobs have called, in a process that stays, unless this one goes on in their group."""
        global _group
        if job.group is None or job.group != _group:
            recorder.forget()
        _group = job.group
        return _reporting_leaving(channel)

    def hear(self, word: str, channel: Channel) -> None:
        """Answer the question for details. In whatever thread asks, while the main thread waits in native code."""
        if word == "details":
            _say_calls(channel)

    def failed(self, error: BaseException, job: Job, channel: Channel) -> None:
        """Say it of a rank that fails, too."""
        _say_calls(channel, error.__traceback__)


def _say_calls(channel: Channel, trace: TracebackType | None = None) -> None:
    channel.send(Attached(channel.rank, KIND, pickle.dumps(tuple(recorder.look(channel.rank, trace)))))


@contextlib.contextmanager
def _reporting_leaving(channel: Channel) -> Iterator[None]:
    """Have the notebook know when the function leaves the process group, and where.

    `destroy_process_group` is replaced meanwhile: PyTorch tells nobody of it. What still fails: a module of the
    reader's that is already there and has imported the name itself. Such a rank is only known to be in no group when
    it is asked.
    """
    real = distributed_c10d.destroy_process_group

    @functools.wraps(real)
    def destroy_process_group(group: Any = None) -> None:
        if not channel.is_copy and dist.is_initialized() and group in (None, dist.group.WORLD):
            frames = traceback.extract_stack(sys._getframe(1))[-FRAMES:]
            _say_calls(channel)
            left = tuple((frame.filename, frame.lineno or 0, frame.name) for frame in reversed(frames))
            channel.send(Attached(channel.rank, LEFT, pickle.dumps(left)))
        real(group)

    for module in (distributed_c10d, dist):
        module.destroy_process_group = destroy_process_group  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for module in (distributed_c10d, dist):
            module.destroy_process_group = real  # type: ignore[attr-defined]
