"""What fits: the largest batch, the fewest ranks, and, with a cost model, the fastest of what fits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from course.scaling.cost_model import Fit, Prediction
from course.scaling.memory_model import predict_memory
from course.scaling.rank_memory import Memory, fewest_that_fit, largest, most_that_fit
from course.transformer import ALL, GPT, OneFOneB
from labkit.protocol.text import titled

COST_MODEL_NAMES = {"DDP": "DDP", "FSDP2": "FSDP", "1F1B": "pipeline"}
"""What the cost model calls the strategies of which it knows the time."""


def fits(
    limit_bytes: float, model: GPT, strategy: str, world_size: int, batch: int, sequence: int, **options: Any
) -> bool:
    """Return whether no rank holds more than `limit_bytes`; `options` are those of `predict_memory`."""
    return largest(predict_memory(model, strategy, world_size, batch, sequence, **options)).total <= limit_bytes


def largest_batch(
    limit_bytes: float, model: GPT, strategy: str, world_size: int, sequence: int, most: int = 2**16, **options: Any
) -> int:
    """Return the largest batch, over all ranks, with which every rank stays below the limit; 0 if none does.

    Only batches that the strategy can cut are tried, and none above `most`. Raises ValueError as `predict_memory` does.
    """
    each = _smallest_batch(strategy, world_size)

    def total(times: int) -> int:
        return largest(predict_memory(model, strategy, world_size, times * each, sequence, **options)).total

    return each * most_that_fit(limit_bytes, total, max(1, most // each))


def fewest_ranks(
    limit_bytes: float, model: GPT, strategy: str, batch: int, sequence: int, most: int = 1024, **options: Any
) -> int | None:
    """Return the fewest ranks on which a batch fits, of 1, 2, 4, 8, … `most`; None if it fits on none of them.

    Numbers of ranks by which the strategy cannot cut model or batch are passed over. Raises ValueError, with the last
    reason, if that is so of all of them.
    """
    return fewest_that_fit(
        strategy, lambda ranks: fits(limit_bytes, model, strategy, ranks, batch, sequence, **options), most
    )


class Choice(NamedTuple):
    """A strategy that fits, and how long its step takes."""

    strategy: str
    memory: Memory
    """Of the rank that holds most."""
    step: Prediction


def fastest(
    limit_bytes: float,
    model: GPT,
    ranks: int,
    batch: int,
    sequence: int,
    cost: Fit,
    strategies: Sequence[str] = tuple(COST_MODEL_NAMES),
    **options: Any,
) -> list[Choice]:
    """Return the strategies that fit, the fastest first, with the range that the fitted cost model gives each.

    Where ranges overlap, the order is a guess. A strategy that cannot cut model or batch so does not fit. Raises
    ValueError for one whose time the cost model does not know, and for a pipeline that it would cut otherwise.
    """
    choices = []
    for strategy in strategies:
        strategy = titled(strategy, ALL)
        if strategy not in COST_MODEL_NAMES:
            raise ValueError(f"the cost model knows the time of {', '.join(COST_MODEL_NAMES)}; got {strategy!r}")
        pieces, has = OneFOneB.micro_batches, cost.model
        if strategy == "1F1B" and (has.stages < ranks or has.micro_batches != pieces):
            raise ValueError(
                f"the cost model has {has.stages} stages and {has.micro_batches} micro-batches; for 1F1B on {ranks} "
                f"ranks give it stages={ranks}, micro_batches={pieces}"
            )
        try:
            most = largest(predict_memory(model, strategy, ranks, batch, sequence, **options))
        except ValueError:
            continue
        if most.total <= limit_bytes:
            choices.append(Choice(strategy, most, cost.predict(ranks, batch, COST_MODEL_NAMES[strategy])))
    return sorted(choices, key=lambda choice: choice.step.step_s)


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
