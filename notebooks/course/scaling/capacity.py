"""What fits: the largest batch, and the fewest ranks."""

from __future__ import annotations

from typing import Any

from torch import nn

from course.scaling.memory_model import predict_memory
from course.scaling.parts import largest
from course.transformer import ALL, GPT
from labkit.protocol.text import titled


def fits(
    limit_bytes: float, model: nn.Module, strategy: str, world_size: int, batch: Any, *others: Any, **options: Any
) -> bool:
    """Return whether no rank holds more than `limit_bytes`; all others are `predict_memory`'s arguments."""
    return largest(predict_memory(model, strategy, world_size, batch, *others, **options)).total <= limit_bytes


def largest_batch(
    limit_bytes: float, model: GPT, strategy: str, world_size: int, sequence: int, most: int = 2**16, **options: Any
) -> int:
    """Return the largest batch, over all ranks, with which every rank stays below the limit; 0 if none does.

    Only batches that the strategy can cut are tried, and none above `most`. Raises ValueError as `predict_memory` does.
    """
    each = _smallest_batch(strategy, world_size)

    def total(times: int) -> int:
        return largest(predict_memory(model, strategy, world_size, times * each, sequence, **options)).total

    one = total(1)
    if one > limit_bytes:
        return 0
    most = max(1, most // each)
    more = max(1, total(2) - one)  # memory grows nearly in proportion: begin where it would be full
    times = max(1, min(most, 1 + int((limit_bytes - one) // more)))
    while times > 1 and total(times) > limit_bytes:
        times -= 1
    while times < most and total(times + 1) <= limit_bytes:
        times += 1
    return each * times


def fewest_ranks(
    limit_bytes: float, model: nn.Module, strategy: str, batch: Any, *others: Any, most: int = 1024, **options: Any
) -> int | None:
    """Return the fewest ranks on which a batch fits, of 1, 2, 4, 8, … `most`; None if it fits on none of them.

    Numbers of ranks by which the strategy cannot cut model or batch are passed over. Raises ValueError, with the last
    reason, if that is so of all of them.
    """
    refused, tried = "", False
    for ranks in (2**power for power in range(most.bit_length())):
        try:
            found = fits(limit_bytes, model, strategy, ranks, batch, *others, **options)
        except ValueError as error:
            refused = str(error)
            continue
        tried = True
        if found:
            return ranks
    if not tried:
        raise ValueError(f"{strategy} runs on no number of ranks up to {most}: {refused}")
    return None


def _smallest_batch(strategy: str, ranks: int) -> int:
    """Return the smallest batch of which every rank has its part; all others are its multiples."""
    strategy = titled(strategy, ALL)
    kind: Any = ALL[strategy]
    if strategy in ("one process", "tensor parallel", "sequence parallel") or strategy.startswith("context"):
        return 1
    if hasattr(kind, "ranks_per_replica"):
        ranks = ranks // kind.ranks_per_replica
    elif hasattr(kind, "micro_batches"):
        ranks = 1
    return ranks * getattr(kind, "micro_batches", 1)
