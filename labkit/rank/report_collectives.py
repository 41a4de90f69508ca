"""Reports which collectives a rank has called, and that it has left its process group."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from labkit.protocol.job import Job, RankHook
from labkit.rank import recorder
from labkit.rank.channels import Channel

KIND = "collectives"
"""The kind of the event with a rank's collectives."""

LEFT = "left"
"""The kind of the event that a rank has left its group, with the frames: (file, line, function), most recent first."""

THREADS = "threads"
"""The kind of the event with what `look_at_threads` has found."""

DEEPEST, KEPT = 95, 45
"""faulthandler writes the most recent 100 frames; of a deeper stack, this many frames of either end are sent."""

COLLECTIVES = tuple(
    str(Path(torch.__file__).parent / place)
    for place in ("distributed/", "nn/parallel/distributed.py", "autograd/graph.py")
)
"""Where torch waits for other ranks; in the last, DDP does during the backward pass."""

FRAMES = 20
"""The most recent frames that are sent of the call by which a rank left its group."""

_group: int | None = None
"""The number of the process group of the last job, if that stays from cell to cell."""


class ReportCollectives(RankHook):
    """Reports which collectives the rank has called: when it is asked, when it fails, and at the end of a cell."""

    def around(self, job: Job, channel: Channel) -> contextlib.AbstractContextManager[None]:
        """Forget what earlier jobs have called, in a process that stays, unless this one goes on in their group."""
        global _group
        if job.group is None or job.group != _group:
            recorder.forget()
        _group = job.group
        return _reporting_leaving(channel, is_cell=job.group is not None)

    def receive(self, word: str, channel: Channel) -> None:
        """Answer the question for details, in the asking thread, while the main thread waits in native code."""
        if word == "details":
            _say_calls(channel)
            channel.attach(THREADS, look_at_threads())

    def failed(self, error: BaseException, job: Job, channel: Channel) -> None:
        """Report the calls of a rank that fails."""
        _say_calls(channel, error.__traceback__, is_last=True)


def _say_calls(channel: Channel, trace: TracebackType | None = None, is_last: bool = False) -> None:
    said = recorder.look(channel.rank, trace)._replace(is_last=is_last)
    channel.attach(KIND, tuple(said))


@contextlib.contextmanager
def _reporting_leaving(channel: Channel, is_cell: bool) -> Iterator[None]:
    """Report when and where the function leaves the process group, and at its end what a cell has called.

    Of a function that is no cell, only its groups are reported, if it has made any.

    After a cell its ranks stay in the group, so nobody else would learn which calls it has not come to.

    `destroy_process_group` is replaced meanwhile: PyTorch tells nobody of it. What still fails: a module of the
    user's that is already there and has imported the name itself. Such a rank is only known to be in no group when
    it is asked.
    """
    real = distributed_c10d.destroy_process_group

    @functools.wraps(real)
    def destroy_process_group(group: Any = None) -> None:
        if not channel.is_copy and dist.is_initialized() and group in (None, dist.group.WORLD):
            frames = traceback.extract_stack(sys._getframe(1))[-FRAMES:]
            _say_calls(channel)
            left = tuple((frame.filename, frame.lineno or 0, frame.name) for frame in reversed(frames))
            channel.attach(LEFT, left)
        real(group)

    for module in (distributed_c10d, dist):
        module.destroy_process_group = destroy_process_group  # type: ignore[attr-defined]
    try:
        yield
        if not channel.is_copy:
            if is_cell:
                _say_calls(channel)
            elif dist.is_initialized() and distributed_c10d._world.group_count > 1:
                # A rank in no group but the first says so, too: then nobody expects it in another's call.
                here = recorder.Collectives(channel.rank, groups=recorder.groups(), unknown=recorder.RETURNED)
                channel.attach(KIND, tuple(here))
    finally:
        for module in (distributed_c10d, dist):
            module.destroy_process_group = real  # type: ignore[attr-defined]


def look_at_threads() -> tuple[list[tuple[str, int, str]], list[tuple[str, int, str]]]:
    """Return what `faulthandler` does not write of this process's threads.

    Returns:
        The main thread's frames, most recent first, if they are too many for `faulthandler`, and those of another
        thread that waits for other ranks; either is empty if there is none.
    """
    main, frames = threading.main_thread().ident or 0, _frames_of_threads()
    deep = _named(frames[main])
    deep = deep[:KEPT] + deep[-KEPT:] if len(deep) > DEEPEST else []
    ours = {thread.ident for thread in threading.enumerate() if thread.name.startswith("labkit-")}
    for ident, frame in frames.items():
        if ident != main and ident not in ours and frame.f_code.co_filename.startswith(COLLECTIVES):
            return deep, _named(frame)[:DEEPEST]
    return deep, []


def _frames_of_threads() -> dict[int, FrameType]:
    """Return each thread's frame by its ident; for this thread, the frame that called the function that asks.

    That one's own frame would have the dictionary among its variables: a cycle, in which the main thread's variables,
    its network with them, would stay until the garbage collector comes by.
    """
    own, caller = threading.get_ident(), sys._getframe(1).f_back
    frames = {ident: frame for ident, frame in sys._current_frames().items() if ident != own}
    return frames if caller is None else {**frames, own: caller}


def _named(frame: FrameType) -> list[tuple[str, int, str]]:
    return [(each.f_code.co_filename, line, each.f_code.co_name) for each, line in traceback.walk_stack(frame)]
