"""The shapes of parameters, and who has which of them."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Mapping

Tensors = Mapping[tuple[int, ...], int]
"""Shapes of some parameters, and how many have each."""


def times(tensors: Tensors, factor: int) -> Counter[tuple[int, ...]]:
    """Return so many times as many of each."""
    return Counter({tensor: factor * count for tensor, count in tensors.items()})


def numbers(tensors: Tensors) -> int:
    """Return how many parameters there are in all."""
    return sum(count * math.prod(tensor) for tensor, count in tensors.items())


def shards(tensors: Tensors, parts: int, index: int) -> Tensors:
    """Return FSDP2's shards: of each parameter some rows, as `torch.chunk` deals them out."""
    if parts == 1:
        return tensors
    shards: Counter[tuple[int, ...]] = Counter()
    for (rows, *others), count in tensors.items():
        each = -(-rows // parts)
        shards[max(0, min(each, rows - index * each)), *others] += count
    return shards


def owned(tensors: Tensors, ranks: int) -> list[Tensors]:
    """Return whose state is on which rank: `ZeroRedundancyOptimizer` gives the next largest to who has least."""
    owned: list[Counter[tuple[int, ...]]] = [Counter() for _ in range(ranks)]
    least = [(0, rank) for rank in range(ranks)]
    for tensor in sorted(Counter(tensors).elements(), key=math.prod, reverse=True):
        size, rank = heapq.heappop(least)
        owned[rank][tensor] += 1
        heapq.heappush(least, (size + math.prod(tensor), rank))
    return list(owned)
