"""How long recorded steps take on ideal devices: one for each rank, or each of its devices, and a link from each.

Computed, not timed, so that nothing else that the machine does is in it. A device computes what it was given in order,
at one speed. A collective begins when all its ranks have called it and lasts as long as its textbook says; a message
begins when it was sent. A link carries one thing at a time, beside what is computed.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from labkit.comparison.hardware import DEVICES, link_of
from labkit.comparison.program import Piece, Program, expected_bytes
from labkit.comparison.timed import Timed
from labkit.trace.profiling import Mark

STEPS = 4
"""Of a replay; the first fills pipelines."""


@dataclass(frozen=True)
class Devices:
    """The speed of every device, and of the link that each has to the others."""

    gflops: float = 30.0
    """10⁹ floating-point operations a second: what a layer reaches, not what a data sheet promises."""
    link_gbytes_s: float = 2.0
    """10⁹ bytes a second, in each direction."""
    latency_us: float = 20.0
    """Microseconds until the first byte of a message arrives."""
    name: str = "your own"
    source: str = ""

    def __post_init__(self) -> None:
        for name in ("gflops", "link_gbytes_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be a number greater than 0, got {getattr(self, name)!r}")
        if not 0 <= self.latency_us < math.inf:
            raise ValueError(f"latency_us must be a number from 0 on, got {self.latency_us!r}")

    def __str__(self) -> str:
        return f"{self.gflops:,g} GFLOP/s, {self.link_gbytes_s:,g} GB/s"

    def seconds(self, piece: Piece) -> float:
        """Return how long a call is on the link."""
        ranks = len(piece.ranks)
        rounds = {"all_reduce": 2 * (ranks - 1), "all_gather": ranks - 1, "reduce_scatter": ranks - 1}
        size = (
            piece.size
            if piece.what in ("broadcast", "reduce", "copy")
            else expected_bytes(*piece[:1], piece.size, ranks)
        )
        return max(1, rounds.get(piece.what, 1)) * self.latency_us / 1e6 + size / (self.link_gbytes_s * 1e9)


def _named(device: str, link: str, name: str) -> Devices:
    """Return devices with the peaks of data sheets, of 64-bit numbers."""
    computes = DEVICES[device]
    carries = link_of(link, computes)
    sources = dict.fromkeys((computes.source, carries.source))
    return Devices(
        1000 * computes.tflops["64"], carries.gbytes_s, carries.latency_us, name, f"64-bit peaks: {'; '.join(sources)}"
    )


LAPTOP = _named("laptop", "loopback", "two cores of a laptop")
NAMED = (
    LAPTOP,
    _named("A100", "NVLink", "A100, NVLink"),
    _named("H100", "NVLink", "H100, NVLink"),
    _named("H100", "100 Gb/s", "H100, 100 Gb/s Ethernet"),
    _named("L4", "PCIe 4", "L4, PCIe 4"),
    _named("T4", "25 Gb/s", "T4, 25 Gb/s Ethernet"),
)
"""Real ones, by their data sheets: what no program quite reaches."""


class ReplayError(ValueError):
    """Recorded steps do not fit together: a rank waits for what none of the others sends."""


def replay(programs: Sequence[Program], devices: Devices = LAPTOP, steps: int = STEPS) -> list[list[Timed]]:
    """Return when every device of every rank does what, in seconds: by rank, then by the rank's devices.

    Args:
        programs: one step of each rank, which all of them repeat.
        devices: their speed.
        steps: how often; the first is left out of what is returned.

    Raises ReplayError where a rank would wait for ever.
    """
    return _Replay(programs, devices).run(steps)


@dataclass
class _Call:
    """A collective or a message: who has called it, and when it is over."""

    piece: Piece
    posted_s: dict[int, float] = dataclasses.field(default_factory=dict)
    start_s: float = math.nan
    end_s: float = math.nan


class _Replay:
    def __init__(self, programs: Sequence[Program], devices: Devices) -> None:
        self._programs, self._devices = programs, devices
        ranks = range(len(programs))
        self._now_s = [[0.0] * program.devices for program in programs]
        self._link_s = [[0.0] * program.devices for program in programs]
        """When what was last put on each device's link has left it."""
        self._marks: list[list[list[Mark]]] = [[[] for _ in range(program.devices)] for program in programs]
        self._steps: list[list[Mark]] = [[] for _ in ranks]
        self._began_s = [0.0 for _ in ranks]
        self._open: list[dict[int, _Call]] = [{} for _ in ranks]
        self._collectives: dict[tuple[str, tuple[int, ...], int], _Call] = {}
        self._called: list[dict[tuple[str, tuple[int, ...]], int]] = [{} for _ in ranks]
        self._messages: dict[tuple[int, int], tuple[deque[_Call], deque[_Call]]] = {}
        """From rank to rank: those sent, and those awaited, that have not met."""

    def run(self, steps: int) -> list[list[Timed]]:
        places = [0] * len(self._programs)
        ends = [steps * len(program.pieces) for program in self._programs]
        for rank, program in enumerate(self._programs):
            if not program.pieces:
                self._steps[rank] = [Mark("step", 0.0, 0.0)] * steps
        while any(place < end for place, end in zip(places, ends, strict=True)):
            before = list(places)
            for rank, program in enumerate(self._programs):
                while places[rank] < ends[rank]:
                    index = places[rank] % len(program.pieces)
                    if not self._do(rank, program.pieces[index]):
                        break
                    places[rank] += 1
                    if index == len(program.pieces) - 1:
                        self._end_step(rank)
            if places == before:
                stuck = [rank for rank, (place, end) in enumerate(zip(places, ends, strict=True)) if place < end]
                raise ReplayError(f"in the recorded step rank {stuck[0]} waits for what no other rank sends")
        return [
            [Timed(self._steps[rank][1:], marks) for marks in self._marks[rank]] for rank in range(len(self._programs))
        ]

    def _end_step(self, rank: int) -> None:
        end_s = max(self._now_s[rank])
        self._steps[rank].append(Mark("step", self._began_s[rank], end_s))
        self._began_s[rank] = end_s

    def _do(self, rank: int, piece: Piece) -> bool:
        """Have a rank do what comes next. Return whether it could."""
        now_s = self._now_s[rank]
        if piece.what == "wait":
            return self._wait(rank, piece.number)
        if piece.what == "copy":
            self._copy(rank, piece)
        elif piece.ranks:
            self._post(rank, piece)
        else:
            seconds = piece.flops / (self._devices.gflops * 1e9)
            began_s = now_s[piece.device]
            now_s[piece.device] += seconds
            self._mark(rank, piece.device, piece.what, began_s, now_s[piece.device])
        return True

    def _mark(self, rank: int, device: int, what: str, start_s: float, end_s: float) -> None:
        marks = self._marks[rank][device]
        if end_s <= start_s:
            return
        if marks and marks[-1].what == what != "communication" and marks[-1].end_s == start_s > self._began_s[rank]:
            marks[-1] = marks[-1]._replace(end_s=end_s)  # it goes on
        else:
            marks.append(Mark(what, start_s, end_s))

    def _copy(self, rank: int, piece: Piece) -> None:
        now_s, links = self._now_s[rank], self._link_s[rank]
        start_s = max(now_s[piece.device], links[piece.device])
        end_s = links[piece.device] = start_s + self._devices.seconds(piece)
        self._mark(rank, piece.peer, "waiting", now_s[piece.peer], start_s)
        for device in (piece.device, piece.peer):
            self._mark(rank, device, "communication", start_s, end_s)
        now_s[piece.peer] = max(now_s[piece.peer], end_s)

    def _post(self, rank: int, piece: Piece) -> None:
        now_s = self._now_s[rank][0]
        if piece.what in ("send", "recv"):
            pair = (rank, piece.peer) if piece.what == "send" else (piece.peer, rank)
            sent, awaited = self._messages.setdefault(pair, (deque(), deque()))
            call = _Call(piece, {rank: now_s})
            (sent if piece.what == "send" else awaited).append(call)
            if piece.what == "send":
                call.start_s = max(now_s, self._link_s[rank][0])
                call.end_s = self._link_s[rank][0] = call.start_s + self._devices.seconds(piece)
                self._mark(rank, 0, "communication", call.start_s, call.end_s)
            if sent and awaited:
                awaited[0].start_s, awaited[0].end_s = sent[0].start_s, sent[0].end_s
                sent.popleft(), awaited.popleft()
        else:
            key = piece.what, piece.ranks
            count = self._called[rank][key] = self._called[rank].get(key, -1) + 1
            call = self._collectives.setdefault((*key, count), _Call(piece))
            call.posted_s[rank] = now_s
            if len(call.posted_s) == len(piece.ranks):
                self._travel(call)
        self._open[rank][piece.number] = call

    def _travel(self, call: _Call) -> None:
        links = [self._link_s[rank] for rank in call.posted_s]
        call.start_s = max([*call.posted_s.values(), *(link[0] for link in links)])
        call.end_s = call.start_s + self._devices.seconds(call.piece)
        for rank in call.posted_s:
            self._link_s[rank][0] = call.end_s
            self._mark(rank, 0, "communication", call.start_s, call.end_s)

    def _wait(self, rank: int, number: int) -> bool:
        call = self._open[rank].get(number)
        if call is None:
            return True
        if math.isnan(call.end_s):
            return False
        del self._open[rank][number]
        now_s = self._now_s[rank][0]
        # While its own message is on the link it communicates; what another sends it awaits.
        self._mark(rank, 0, "waiting", now_s, call.end_s if call.piece.what == "recv" else call.start_s)
        self._now_s[rank][0] = max(now_s, call.end_s)
        return True
