"""How far apart the clocks of the ranks' machines are, asked through the store that all ranks reach.

Ranks of one machine share a clock: nothing is asked of them. On another machine a rank writes a question into the
store, rank 0 answers with its time, and what the rank read off its own clock before and after says how far apart they
are, and by how much that may be wrong: half of the time that it took (Cristian 1989, "Probabilistic clock
synchronization"). Of several exchanges the quickest counts. The store itself makes each of them two or three times as
long as the network would.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from labkit.system import host

ROUNDS = 8
"""Exchanges of each rank with rank 0."""


class Offset(NamedTuple):
    """How far a rank's clock is from rank 0's."""

    machine: str
    offset_s: float
    """To be added to the rank's time to get rank 0's …"""
    uncertain_s: float
    """… and by how much that may be wrong."""


def estimate(exchanges: Iterable[tuple[float, float, float]]) -> tuple[float, float]:
    """Return offset and uncertainty of (asked, answered, heard), the middle one by the other clock; in seconds."""
    asked_s, answered_s, heard_s = min(exchanges, key=lambda each: each[2] - each[0])
    return answered_s - (asked_s + heard_s) / 2, (heard_s - asked_s) / 2


def compare(worker: Any, machine: str = "", now: Callable[[], float] = time.time) -> Offset:
    """Return how far this rank's clock is from rank 0's. Every rank calls it, before the function."""
    identity = machine or identify()
    machine = machine or host.node()
    store, rank, world_size = worker._channel.store, worker.rank, worker.world_size
    if store is None or world_size == 1:
        return Offset(machine, 0.0, 0.0)
    key = "labkit/clock"
    store.set(f"{key}/machine/{rank}", identity)
    if rank:
        if store.get(f"{key}/machine/0").decode() == identity:
            return Offset(machine, 0.0, 0.0)
        exchanges = []
        for number in range(ROUNDS):
            asked_s = now()
            store.set(f"{key}/asked/{rank}/{number}", "")
            answered_s = float(store.get(f"{key}/answered/{rank}/{number}"))
            exchanges.append((asked_s, answered_s, now()))
        return Offset(machine, *estimate(exchanges))
    for other in range(1, world_size):
        if store.get(f"{key}/machine/{other}").decode() == identity:
            continue
        for number in range(ROUNDS):
            store.wait([f"{key}/asked/{other}/{number}"])
            store.set(f"{key}/answered/{other}/{number}", repr(now()))
    return Offset(machine, 0.0, 0.0)


def identify() -> str:
    """Return what tells this machine's clock from another's: containers on one machine share theirs."""
    return host.boot()
