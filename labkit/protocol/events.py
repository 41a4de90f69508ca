"""What travels from a rank to the notebook: a few small typed values, and the batching of the commonest one.

Everything here is picklable and knows nothing of processes, so that another carrier (files on a cluster, say) can
bring the same records.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from labkit.protocol.packed import Packed

from labkit.system.out_of_memory import OutOfMemory

RESERVED_NAMES = ("rank", "step", "time_s")
"""Columns of the history that `worker.log` fills in itself."""


class Started(NamedTuple):
    """The rank has joined the process group and is about to call the function."""

    rank: int
    device: str = ""
    """Where it computes: "cpu", "cuda:0"; with its machine, where ranks may be on several."""
    note: str = ""
    """Why that is not a GPU of its own though there are GPUs."""


class Expect(NamedTuple):
    """How many steps the rank says it will take in all."""

    rank: int
    steps: int


class Log(NamedTuple):
    """Consecutive log calls of one rank that named the same values."""

    rank: int
    names: tuple[str, ...]
    steps: array[int]
    """One per call."""
    times_s: array[float]
    """One per call: seconds since the launch."""
    values: array[float]
    """calls × names, row by row."""


class Output(NamedTuple):
    """Text that the rank, or native code in it, wrote to stdout or stderr."""

    rank: int
    text: str


class Result(NamedTuple):
    """The function returned on this rank."""

    rank: int
    value: Packed
    """What it returned."""


class Stopped(NamedTuple):
    """The rank left the function because the run was asked to stop; it has no return value."""

    rank: int


class Failure(NamedTuple):
    """The rank's own account of an exception, sent before it leaves the process group."""

    rank: int
    time_s: float
    """Seconds since the launch at which the exception was caught."""
    during: str
    """What the rank was doing: "running", "receiving the function", "sending the result" …"""
    summary: str
    """The exception's type and first line."""
    traceback: str
    frames: tuple[tuple[str, int, str], ...] = ()
    """(file, line, function) of the traceback, most recent first."""


class Ready(NamedTuple):
    """The process has imported what a job needs, and waits for one."""

    rank: int = -1
    """It has none yet."""


class Memory(NamedTuple):
    """Peak memory of the rank's process."""

    rank: int
    peak_bytes: int
    """Resident memory of the process, on the host."""
    peak_device_bytes: int
    """Allocated by PyTorch on the rank's GPU; 0 on CPU."""


class Stack(NamedTuple):
    """Part of what `faulthandler` wrote when the rank was asked where it stands."""

    rank: int
    text: str


class Answered(NamedTuple):
    """The rank was asked for details, and its hooks have sent what they know as `Attached`."""

    rank: int


class Attached(NamedTuple):
    """What else a rank reports, by kind: its collectives, its variables, what it waits for, its trace."""

    rank: int
    kind: str
    """What it is: "trace", "collectives", "variables"."""
    blob: bytes


class Asks(NamedTuple):
    """A rank's debugger waits for a line."""

    rank: int
    text: str
    """What it has written since it last asked; the prompt comes last."""


class Warned(NamedTuple):
    """Something went wrong that does not end the run: what cannot be written or read, a clock that is off."""

    rank: int
    """-1: of all ranks."""
    topic: str
    text: str
    """One line, for the run's report; "" once there is no more to say of the topic."""


class Exit(NamedTuple):
    """The rank's process is gone or, on reserved ranks, has done its part. The last record of a rank."""

    rank: int
    code: int
    """As in `multiprocessing.Process.exitcode`: minus the signal's number if a signal ended it."""
    out_of_memory: OutOfMemory = ""
    """Whether it was killed because memory had run out."""
    ended: bool = False
    """Whether it was ended from outside: by a cluster's scheduler, say, because another rank had failed."""
    at_s: float = 0.0
    """When, as `time.time()`; 0: just now."""
    unseen: bool = False
    """Whether nobody is left who saw it end: the code is a guess."""


@dataclass(frozen=True)
class Change:
    """What a launcher reports of a run. It says itself what that changes."""

    rank: int
    """-1: of all ranks."""

    def change(self, state: Any, now_s: float) -> None:
        """Change what is known of the run, a `labkit.monitor.state.RunState`."""
        raise NotImplementedError


Event = (
    Started
    | Expect
    | Log
    | Output
    | Result
    | Stopped
    | Failure
    | Ready
    | Memory
    | Stack
    | Answered
    | Asks
    | Attached
    | Warned
    | Exit
    | Change
)
