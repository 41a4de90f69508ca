"""What one rank recorded of some steps.

Times are seconds since the record's own zero, by the clock of the rank's machine: seconds since 1970 would be exact to
a quarter of a microsecond only, and operators that follow each other would overlap.
"""

from __future__ import annotations

import pickle
import zlib
from typing import Any, NamedTuple

Place = tuple[str, int]
"""File, as tracebacks name it, and line of the reader's own code; ("", 0): not known."""

NOWHERE: Place = ("", 0)

PARTS = ("data", "forward", "backward", "optimizer", "other")
"""Of a step, as far as a rank's own work goes; "other" is what lies outside of the first four: the loss, say, logging,
and whatever Python does there."""

WAITING, TRANSFER = "waiting", "transfer"
"""The two parts of a collective: until the last rank has entered it, and from then on."""

MAIN = "main thread"


class Span(NamedTuple):
    """An operator that a rank's processor computed, or a kernel on its GPU."""

    name: str
    part: str
    """One of `PARTS`."""
    lane: str
    """ "main thread", "thread 2", "stream 7"."""
    start_s: float
    end_s: float
    depth: int = 0
    """0: within no other that computes."""
    shapes: tuple[tuple[int, ...], ...] = ()
    """Of the tensors put in."""
    size: int = 0
    """Bytes of these."""
    place: Place = NOWHERE


class Call(NamedTuple):
    """A collective, or a message, from when the rank called it until it had ended there."""

    kind: str
    """ "all_reduce"."""
    key: tuple[str, int] | None
    """Group and number in it: what meets what on other ranks. None: not known."""
    start_s: float
    end_s: float
    shapes: tuple[tuple[int, ...], ...] = ()
    size: int = 0
    """Bytes that this rank put in."""
    place: Place = NOWHERE
    lane: str = "collectives"


class Phase(NamedTuple):
    """A whole part of a step: a call of the network, a backward pass, an optimizer's step, a batch being loaded."""

    part: str
    start_s: float
    end_s: float
    place: Place = NOWHERE


class Held(NamedTuple):
    """What the rank held at one time, in bytes by part: "parameters", "gradients", "optimizer state", "activations"."""

    at_s: float
    bytes: dict[str, int]


class RankTrace(NamedTuple):
    """All that one rank recorded."""

    rank: int
    machine: str
    """Name of the machine: ranks of one machine share a clock."""
    zero_ns: int = 0
    """The zero of all times: ns since 1970."""
    steps: tuple[tuple[float, float], ...] = ()
    """From when to when each lasted."""
    phases: tuple[Phase, ...] = ()
    spans: tuple[Span, ...] = ()
    calls: tuple[Call, ...] = ()
    lines: tuple[tuple[float, Place], ...] = ()
    """When the main thread came to which line of the reader's code."""
    groups: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Name and ranks of each process group."""
    left_out: int = 0
    """How many spans were more than there is room for: the shortest."""
    offset_s: float = 0.0
    """To be added to this rank's times to get rank 0's …"""
    uncertain_s: float = 0.0
    """… and by how much that may be wrong; 0 on one machine."""
    memory: tuple[Held, ...] = ()
    unknown: str = ""
    """Why there is nothing, or less than there should be; "" if all is there."""

    def on_clock_of_rank_0(self, zero_ns: int = 0) -> RankTrace:
        """Return the same with all times on rank 0's clock, since another zero."""
        by = self.offset_s + (self.zero_ns - zero_ns) / 1e9
        if not by:
            return self

        def moved(each: Any) -> Any:
            return tuple(e._replace(start_s=e.start_s + by, end_s=e.end_s + by) for e in each)

        return self._replace(
            steps=tuple((a + by, b + by) for a, b in self.steps),
            phases=moved(self.phases),
            spans=moved(self.spans),
            calls=moved(self.calls),
            lines=tuple((at + by, place) for at, place in self.lines),
            memory=tuple(Held(held.at_s + by, held.bytes) for held in self.memory),
            offset_s=0.0,
            zero_ns=zero_ns,
        )


def pack(trace: RankTrace) -> bytes:
    """Return a rank's record as it travels."""
    return zlib.compress(pickle.dumps(trace), 1)


def unpack(blob: bytes) -> RankTrace:
    """Return what `pack` packed."""
    found: RankTrace = pickle.loads(zlib.decompress(blob))
    return found
