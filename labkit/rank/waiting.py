"""What a rank's main thread waits for, as another thread of the rank's own process can tell.

Knows only its own process. Whether it all comes to nothing is decided in the notebook, which hears every rank:
`labkit.failures.stop_deadlock`.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch

from labkit.protocol.job import RankHook
from labkit.rank import recorder
from labkit.rank.channels import Channel
from labkit.system import host

_TORCH = Path(torch.__file__).parent

COLLECTIVES = tuple(
    str(_TORCH / place) for place in ("distributed/", "nn/parallel/distributed.py", "autograd/graph.py")
)
"""Where torch waits for other ranks. In the last, the backward pass, DDP does; who computes there works …"""

BACKWARD = str(_TORCH / "autograd" / "graph.py")

NOT_COLLECTIVES = tuple(str(_TORCH / "distributed" / place) for place in ("checkpoint/", "elastic/"))
"""… while these may wait for a disk."""


KIND = "waits"
"""What the notebook knows by it what a rank answers."""


class Waits(NamedTuple):
    """What a rank's main thread was waiting for when it was asked, or asked again, to stop."""

    rank: int
    what: str
    """ "ranks": it was in a collective; "call": it was in one, and perhaps waited for a GPU; "nobody": no thread can
    wake it; "time": it slept; "": something else, or nothing, for it was at work."""
    at: str
    """Equal for two looks at the same wait."""
    left_s: float
    """How long it was going to sleep on."""
    used_s: float
    """Processor time of the rank's process so far, without that of answering."""
    pending: tuple[tuple[str, int, tuple[int, ...]], ...] = ()
    """Of a rank that has used a GPU, the collectives that have not ended: group, number in it, the group's ranks."""
    reached: tuple[tuple[str, int], ...] = ()
    """And of each of its groups, the number of the newest collective to which it has come; 0: it has come to none."""


class ReportWaits(RankHook):
    """Reports what the rank waits for, whenever it is asked to stop."""

    def receive(self, word: str, channel: Channel) -> None:
        """Answer a stop, perhaps once more, in the thread that receives it."""
        if word == "stop":
            channel.attach(KIND, tuple(look(channel.rank)))


def look(rank: int) -> Waits:
    """Return what the main thread waits for just now.

    A wait counts as "ranks" or "nobody" only while no other thread of this process is at work or waits for a disk.
    """
    # What stacks cannot tell is asked of the system: when a sleep ends, whether a thread only waits, and whether the
    # main one has run since it was last looked at. It shows that to the process itself without any permission.
    main = threading.main_thread()
    used_s = time.process_time() - time.thread_time()
    uses_gpu = torch.cuda.is_initialized()
    calls = _calls(rank) if uses_gpu else ((), ())
    if (sleep := host.sleeps_until(main.native_id)) is not None:
        return Waits(rank, "time", f"{sleep!r}", max(0.0, sleep - time.monotonic()), used_s, *calls)
    frames = frames_of_threads()
    frame = frames.get(main.ident or 0)
    if frame is not None and uses_gpu and _in_a_collective(frame):
        # Whoever waits for a GPU keeps a core busy. So what the rank uses of one says nothing.
        return Waits(rank, "call", f"{_lines(frame)} {calls}", 0.0, 0.0, *calls)
    if frame is None or host.others_at_work():
        return Waits(rank, "", "", 0.0, used_s, *calls)
    what = "ranks" if _in_a_collective(frame) else "nobody" if _for_ever(frame, set(frames)) else ""
    return Waits(rank, what, f"{_lines(frame)} {host.times_woken(main.native_id)}", 0.0, used_s, *calls)


def frames_of_threads() -> dict[int, FrameType]:
    """Return each thread's frame by its ident; for this thread, the frame that called the function that asks.

    That one's own frame would have the dictionary among its variables: a cycle, in which the main thread's variables,
    its network with them, would stay until the garbage collector comes by.
    """
    own, caller = threading.get_ident(), sys._getframe(1).f_back
    frames = {ident: frame for ident, frame in sys._current_frames().items() if ident != own}
    return frames if caller is None else {**frames, own: caller}


def _in_a_collective(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    is_in_one = file.startswith(COLLECTIVES) and not file.startswith(NOT_COLLECTIVES)
    # A backward pass on a GPU may wait for what it computes there.
    return is_in_one and not (file == BACKWARD and torch.cuda.is_initialized())


def _calls(rank: int) -> tuple[tuple[tuple[str, int, tuple[int, ...]], ...], tuple[tuple[str, int], ...]]:
    """Return `pending` and `reached` of `Waits`; empty if the rank's collectives are not known."""
    said = recorder.look(rank)
    if said.unknown or said.transfer is not None:
        return (), ()
    members, reached = {name: ranks for name, _, ranks in said.groups}, dict.fromkeys((g[0] for g in said.groups), 0)
    pending = []
    for group, number, _, _, _, done, *_ in said.calls:
        if group in members:
            reached[group] = max(reached[group], number)
            if not done:
                pending.append((group, number, members[group]))
    return tuple(pending), tuple(reached.items())


def _for_ever(frame: FrameType, threads: set[int]) -> bool:
    """Whether it waits, without a limit, for a thread of this process to wake it, and there is none that could."""
    if frame.f_code is not threading.Condition.wait.__code__ or frame.f_locals.get("timeout") is not None:
        return False
    ours = {thread.ident for thread in threading.enumerate() if thread.name.startswith("labkit-")}
    return not threads - ours - {threading.main_thread().ident}


def _lines(frame: FrameType) -> str:
    return " ".join(f"{each.f_code.co_filename}:{line}" for each, line in traceback.walk_stack(frame))
