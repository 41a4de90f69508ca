"""A pipeline's step on ideal devices: an order gives the passes, and a formula how long each takes.

Other programs on the machine delay a measured step, but they do not change the order in which its stages work. Replayed
with fixed durations, that order says what a schedule is worth. So does an order that has never been run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

Pass = tuple[str, int, int]
"""What, stage, and number of the micro-batch. As in `torch.distributed.pipelining`, F is a forward pass, B a backward
pass; I and W are its two halves, for the gradients of the inputs and for those of the weights."""

LETTERS = {"forward": "F", "backward": "B", "weights": "W"}


def passes(marks: Iterable[Any]) -> list[tuple[str, int]]:
    """Return the passes of one stage in order, from its marks, each "forward" or "backward" in `mark.what`."""
    count: Counter[str] = Counter()
    order = []
    for mark in marks:
        order.append((mark.what, count[mark.what]))
        count[mark.what] += 1
    return order


def odd_pass(order: Any, kinds: str, micro_batches: int) -> str:
    """Return what one stage's list of passes has that it should not have: another type, a pass twice; "" for nothing.

    Args:
        order: the list, of pairs: kind, and number of the micro-batch.
        kinds: a letter for each kind of pass.
        micro_batches: how many of them there are.
    """
    if not isinstance(order, list):
        return f"a {type(order).__name__}, expected a list"
    wanted = {(kind, index) for kind in kinds for index in range(micro_batches)}
    for one in order:
        if one not in wanted:
            return f"{one!r} is no pass of {micro_batches} micro-batches"
        if order.count(one) != 1:
            return f"{one!r} is there {order.count(one)} times"
    return ""


def step_length(orders: Sequence[Sequence[tuple[str, int]]], lasts: Mapping[str, float]) -> float:
    """Return how long a step takes if each pass begins as soon as its stage is free and its input has been computed.

    Args:
        orders: for each stage, its passes in order, as `passes` returns them.
        lasts: how long a "forward" and a "backward" pass take, in the unit of the result. Messages take no time.

    Raises:
        ValueError: the orders deadlock.
    """
    by_stage = [[(LETTERS[what], stage, index) for what, index in order] for stage, order in enumerate(orders)]
    return length(on_clock(by_stage, {LETTERS[what]: units for what, units in lasts.items()}))


class Timed(NamedTuple):
    """A pass, and when it begins and ends, in units of the caller's choice."""

    what: str
    stage: int
    micro_batch: int
    begin: float
    end: float


def on_clock(orders: Sequence[Iterable[Pass]], units: Mapping[str, float]) -> list[list[Timed]]:
    """Put the passes of a step on a clock.

    Args:
        orders: for each rank, its passes in the order in which it runs them.
        units: how long a pass takes, by its letter.

    Returns:
        For each rank, its passes with their times.

    Raises:
        ValueError: the orders deadlock.
    """
    left = [list(order) for order in orders]
    stages = 1 + max((stage for order in left for _, stage, _ in order), default=0)
    timed: list[list[Timed]] = [[] for _ in left]
    ends: dict[Pass, float] = {}
    while any(left):
        before = sum(map(len, left))
        for rank, order in enumerate(left):
            while order and all(one in ends for one in needed(order[0], stages)):
                what, stage, micro_batch = order.pop(0)
                free = timed[rank][-1].end if timed[rank] else 0.0
                begin = max([free, *(ends[one] for one in needed((what, stage, micro_batch), stages))])
                timed[rank].append(Timed(what, stage, micro_batch, begin, begin + units[what]))
                ends["B" if what == "I" else what, stage, micro_batch] = begin + units[what]
        if sum(map(len, left)) == before:
            blocked = (f"rank {rank} is blocked before {order[0]}" for rank, order in enumerate(left) if order)
            raise ValueError(f"deadlock: {', '.join(blocked)}")
    return timed


def needed(one: Pass, stages: int) -> list[Pass]:
    """Return the passes that must have ended before this one; I counts as B there."""
    what, stage, micro_batch = one
    if what == "W":
        return [("B", stage, micro_batch)]
    if what == "F":
        return [("F", stage - 1, micro_batch)] if stage else []
    behind = [("B", stage + 1, micro_batch)] if stage < stages - 1 else []
    return [("F", stage, micro_batch), *behind]


def length(timed: Sequence[Sequence[Timed]]) -> float:
    """Return when the last pass ends."""
    return max((one.end for order in timed for one in order), default=0.0)


def most_kept(order: Iterable[Sequence[Any]]) -> int:
    """Return the most forward passes whose activations a rank keeps at a time: until B, or W where B is split."""
    now = most = 0
    for what, *_ in order:
        now += (what == "F") - (what in "BW")
        most = max(most, now)
    return most
