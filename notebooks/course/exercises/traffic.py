"""What a rank sends while an answer is tried: counted, bounded in time, and forbidden where the exercise says so.

The functions of `torch.distributed` are replaced by ones that count, for as long as an answer is tried. What C++ calls
by itself (DDP's reducer, say) is not seen. An answer that waits for what never comes is told so after `patience_s`,
from within: the processes stay; one that computes without end, once it has had its time of the processor. What cannot
be told from within (native code, an `except BaseException`) is ended by the run's own `stall_s`.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from course.exercises.base import POINT_TO_POINT, ring_bytes

COLLECTIVES = (
    *("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "all_to_all", "all_to_all_single"),
    *("broadcast", "broadcast_object_list", "barrier", "monitored_barrier", "gather", "gather_object", "reduce"),
    *("reduce_scatter", "reduce_scatter_tensor", "scatter", "scatter_object_list"),
    *("send_object_list", "recv_object_list", "all_reduce_coalesced", "all_gather_coalesced"),
)

TIMED_OUT = re.compile(r"[Tt]imed out|[Tt]imeout")

PRINTED_CHARACTERS = 1_000_000
"""An answer that prints more is stopped."""


class Told(BaseException):
    """What the learner is told of an answer that was stopped. No Exception: his own code is not to swallow it."""


class Forbidden(Told):
    """A call that the exercise does not allow."""


class Hang(Told):
    """A wait for what does not come."""


class Endless(Told):
    """Python code that does not end."""


class TooMuchPrinted(Told):
    """Output without end."""


class Event(NamedTuple):
    """One thing that a rank did."""

    kind: str
    """The function's name; "wait" for the end of a collective that was begun with async_op=True."""
    peer: int | None
    """The other rank, of a message."""
    bytes: int
    """That this rank sends; of a receive, that it receives."""

    @property
    def is_call(self) -> bool:
        """Whether it is a message sent, or a collective called."""
        return self.kind not in ("recv", "wait") and not self.is_computing

    @property
    def is_computing(self) -> bool:
        """Whether it only shows when something was computed."""
        return self.kind.startswith("backward")


class Work:
    """What `isend`, `irecv` and `async_op=True` return: torch's own, waited for with patience and remembered."""

    def __init__(self, work: Any, kind: str, peer: int | None, traffic: Traffic, event: Event | None) -> None:
        self._work, self._kind, self._peer, self._traffic, self._event = work, kind, peer, traffic, event
        self.was_waited_for = False
        traffic.works.append(self)

    def wait(self, timeout: timedelta | None = None) -> Any:
        """Wait as torch does, but not for ever."""
        with self._traffic.patiently(self._kind, self._peer):
            # Point-to-point does not know the group's own limit, and takes one here.
            done = self._work.wait(timeout or timedelta(seconds=self._traffic.patience_s))
        if not self.was_waited_for and self._event is not None:
            self._traffic.events.append(self._event)
        self.was_waited_for = True
        return done

    @property
    def what(self) -> str:
        """ "irecv from rank 2"."""
        return self._kind + ("" if self._peer is None else f" {_direction(self._kind)} rank {self._peer}")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def _direction(kind: str) -> str:
    return "from" if "recv" in kind else "to"


class Traffic:
    """What one rank does in `torch.distributed` while answers are tried."""

    def __init__(self, allowed: frozenset[str], patience_s: float) -> None:
        self.allowed, self.patience_s = allowed, patience_s
        self.is_watched = False
        """Whether the answer runs; the trial's own calls are not counted."""
        self.forget()

    def forget(self) -> None:
        """Begin to count anew."""
        self.events: list[Event] = []
        self.works: list[Work] = []
        self.sent_to: dict[int, int] = {}
        self.received_from: dict[int, int] = {}

    def count(self, *kinds: str) -> int:
        """Return how often these were called."""
        return sum(event.kind in kinds for event in self.events)

    @property
    def calls(self) -> int:
        """Messages sent, and collectives called."""
        return sum(event.is_call for event in self.events)

    @property
    def bytes_sent(self) -> int:
        """By this rank, collectives by the formulas of a ring."""
        return sum(event.bytes for event in self.events if event.kind != "recv")

    @property
    def unfinished(self) -> list[str]:
        """What was begun and never waited for."""
        return [work.what for work in self.works if not work.was_waited_for]

    @contextlib.contextmanager
    def patiently(self, kind: str, peer: int | None) -> Iterator[None]:
        """Turn torch's own time-out into `Hang`."""
        try:
            yield
        except RuntimeError as error:
            if not TIMED_OUT.search(str(error)):
                raise
            whom = "the other ranks" if peer is None else f"rank {peer}"
            raise Hang(f"waits in {kind} for {whom}") from None

    @contextlib.contextmanager
    def replacing_torchs_own(self) -> Iterator[None]:
        """Replace the functions of torch.distributed for a while."""
        set_timeout = getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout  # its older name
        set_timeout(timedelta(seconds=self.patience_s))
        originals = {name: getattr(dist, name) for name in (*COLLECTIVES, *POINT_TO_POINT)}
        replaced = {name: self._collective(name, original) for name, original in originals.items()}
        for name in ("send", "isend"):
            replaced[name] = self._sending(name, originals["isend"])
        for name in ("recv", "irecv"):
            replaced[name] = self._receiving(name, originals["irecv"], originals["recv"])
        replaced["batch_isend_irecv"] = self._batch
        self._put(replaced)
        try:
            yield
        finally:
            self._put(originals)

    def _put(self, functions: dict[str, Callable[..., Any]]) -> None:
        for name, function in functions.items():
            setattr(dist, name, function)
            setattr(distributed_c10d, name, function)  # by which `from torch.distributed import send` is pickled

    def _may(self, name: str) -> None:
        if self.is_watched and name not in self.allowed:
            instead = f"it allows {', '.join(sorted(self.allowed))}" if self.allowed else "it needs no communication"
            raise Forbidden(f"calls dist.{name}, which this exercise does not allow; {instead}")

    def _sending(self, name: str, isend: Callable[..., Any]) -> Callable[..., Any]:
        def call(tensor: torch.Tensor, dst: int, group: Any = None, tag: int = 0) -> Any:
            self._may(name)
            self._check_peer(name, dst)
            work = isend(tensor, dst, group=group, tag=tag)
            if not self.is_watched:
                return work if name == "isend" else work.wait()
            self.sent_to[dst] = self.sent_to.get(dst, 0) + 1
            self.events.append(Event("send", dst, tensor.numel() * tensor.element_size()))
            waited = Work(work, name, dst, self, None)
            return waited if name == "isend" else waited.wait()

        return _signed(call, getattr(dist, name))

    def _receiving(self, name: str, irecv: Callable[..., Any], recv: Callable[..., Any]) -> Callable[..., Any]:
        def call(tensor: torch.Tensor, src: int | None = None, group: Any = None, tag: int = 0) -> Any:
            self._may(name)
            if not self.is_watched or src is None:
                return (recv if name == "recv" else irecv)(tensor, src, group=group, tag=tag)
            self._check_peer(name, src)
            self.received_from[src] = self.received_from.get(src, 0) + 1
            work = irecv(tensor, src, group=group, tag=tag)
            waited = Work(work, name, src, self, Event("recv", src, tensor.numel() * tensor.element_size()))
            if name == "irecv":
                return waited
            waited.wait()
            return src

        return _signed(call, getattr(dist, name))

    def _batch(self, p2p_op_list: list[dist.P2POp]) -> list[Any]:
        """Begin each message of the list by itself, so that each is counted."""
        self._may("batch_isend_irecv")
        return [each.op(each.tensor, each.peer, each.group, each.tag) for each in p2p_op_list]

    def _check_peer(self, name: str, peer: int) -> None:
        if not self.is_watched:
            return
        rank, world_size = dist.get_rank(), dist.get_world_size()
        if not isinstance(peer, int) or not 0 <= peer < world_size:
            raise Forbidden(f"calls dist.{name} with rank {peer}, but the ranks are 0 … {world_size - 1}")
        if peer == rank:
            raise Forbidden(f"calls dist.{name} with its own rank, {rank}: a rank cannot send to itself")

    def _collective(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._may(name)
            if not self.is_watched:
                return original(*args, **kwargs)
            self.events.append(Event(name, None, _ring_bytes(name, args, kwargs)))
            with self.patiently(name, None):
                work = original(*args, **kwargs)
            return Work(work, name, None, self, Event("wait", None, 0)) if hasattr(work, "wait") else work

        return _signed(call, original)


def _signed(call: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    call.__name__, call.__doc__ = original.__name__, original.__doc__
    call.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
    return call


def _ring_bytes(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return what one rank sends where the collective is a ring."""
    n = dist.get_world_size()
    tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]
    if not tensors:
        return 0
    size = max(tensor.numel() * tensor.element_size() for tensor in tensors)  # of all ranks' pieces together
    if name == "all_gather":
        size *= n
    return ring_bytes(size, n) * (2 if name.startswith("all_reduce") else 1)


# What else an answer may do without end


class BoundedOutput(io.TextIOBase):
    """A stream that stops an answer which prints without end."""

    def __init__(self, stream: Any) -> None:
        self._stream, self._left = stream, PRINTED_CHARACTERS

    def write(self, text: str) -> int:
        """Pass the text on, as long as it is not too much."""
        if len(text) > self._left:
            raise TooMuchPrinted(f"prints more than {PRINTED_CHARACTERS:,} characters")
        self._left -= len(text)
        self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush the stream behind."""
        self._stream.flush()


@contextlib.contextmanager
def bounded_output() -> Iterator[None]:
    """Stop whoever prints without end."""
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = BoundedOutput(sys.stdout), BoundedOutput(sys.stderr)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams


def waited_for_core_s(process: int | str = "thread-self") -> float:
    """Return for how many seconds a thread could have run while others had the cores; of a process, the most of any.

    gloo's messages are moved by threads of their own. 0 where the system does not say: it is Linux that does
    (Documentation/scheduler/sched-stats.rst).
    """
    threads = Path(f"/proc/{process}").glob("schedstat" if process == "thread-self" else "task/*/schedstat")
    waited_s = 0.0
    with contextlib.suppress(OSError, ValueError, IndexError):  # a thread has ended meanwhile
        for thread in threads:
            waited_s = max(waited_s, int(thread.read_text(encoding="utf-8").split()[1]) / 1e9)
    return waited_s


@contextlib.contextmanager
def time_limit(limit_s: float, computing_s: float) -> Iterator[None]:
    """Raise `Endless` in what computes for longer than `computing_s`, or takes longer than `limit_s` in all.

    Computing is counted by the processor's clock, which does not go on while others have the core. Who sleeps, or waits
    for another rank, uses no processor: that is counted by the clock on the wall, without the time for which this
    thread was ready and got no core. So on a busy machine a slow answer has its time, where the system counts that.

    In a process's main thread only.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    wall_s, computed_s, starved_s = time.monotonic(), time.thread_time(), waited_for_core_s()

    def ring(*_: Any) -> None:
        if time.thread_time() - computed_s >= computing_s:
            raise Endless(f"has not ended after {computing_s:.2g} s of computing")
        if time.monotonic() - wall_s - (waited_for_core_s() - starved_s) >= limit_s:
            raise Endless(f"has not ended after {limit_s:.2g} s")

    # It rings on, where a `__del__` has swallowed an `Endless`.
    with _alarms(ring, min(limit_s, computing_s) / 4):
        yield


@contextlib.contextmanager
def _alarms(ring: Callable[..., None], tick_s: float) -> Iterator[None]:
    """Call `ring` in this thread, the main one, every so often."""
    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, tick_s, tick_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
