"""A pipeline's step on ideal devices: what is measured gives the order of passes, and a formula how long each takes.

Other programs on the machine delay a measured step, but they do not change the order in which its stages work. Replayed
with fixed durations, that order says what a schedule is worth.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Pass = tuple[str, int]
"""("forward" or "backward", number of the micro-batch)."""


def passes(marks: Iterable[Any]) -> list[Pass]:
    """Return the passes of one stage in order, from its marks, each "forward" or "backward" in `mark.what`."""
    count: Counter[str] = Counter()
    order = []
    for mark in marks:
        order.append((mark.what, count[mark.what]))
        count[mark.what] += 1
    return order


def step_length(orders: Sequence[Sequence[Pass]], lasts: Mapping[str, float]) -> float:
    """Return how long a step takes if each pass begins as soon as its stage is free and its input has been computed.

    Args:
        orders: the passes of each stage, in its order.
        lasts: how long a "forward" and a "backward" pass take, in the unit of the result. Messages take no time.

    Raises ValueError for orders in which stages wait for each other in a circle.
    """
    free, at = [0.0] * len(orders), [0] * len(orders)
    ends: dict[tuple[int, str, int], float] = {}
    while any(place < len(order) for place, order in zip(at, orders, strict=True)):
        before = list(at)
        for stage, order in enumerate(orders):
            while at[stage] < len(order):
                what, index = order[at[stage]]
                needs = _needed(stage, what, index, len(orders))
                if any(one not in ends for one in needs):
                    break
                begin = max([free[stage], *(ends[one] for one in needs)])
                free[stage] = ends[stage, what, index] = begin + lasts[what]
                at[stage] += 1
        if at == before:
            stuck = {stage: order[at[stage]] for stage, order in enumerate(orders) if at[stage] < len(order)}
            raise ValueError(f"the stages wait for each other: {stuck}")
    return max(free)


def _needed(stage: int, what: str, index: int, stages: int) -> list[tuple[int, str, int]]:
    """Return the passes that must be over before this one begins."""
    needs = [(stage, "forward", index)] if what == "backward" else []
    neighbour = stage - 1 if what == "forward" else stage + 1
    return [*needs, (neighbour, what, index)] if 0 <= neighbour < stages else needs
