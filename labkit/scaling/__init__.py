"""How long a training step takes on any number of ranks, and whether they can hold it: calculated, with no rank.

    cost_model         seconds of a step, and a fit to a few measured points
    memory_model       bytes by part and rank, for every strategy of `labkit.transformer`
    capacity           the largest batch that fits, the fewest ranks, the fastest of those that fit
    published_figures  what others say of their models, against what is predicted for them

Below them, `local_parts` is what of a GPT a rank has, `parameters` who has which of its parameters, `counting` how a
forward pass is counted without computing it, and `schedules` what a pipeline's rank holds of which micro-batches.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from labkit.scaling.cost_model import (
    BACKWARD_SHARE,
    STRATEGIES,
    UNKNOWN_NOISE,
    CostModel,
    Fit,
    Point,
    Prediction,
    fit,
    split,
)

if TYPE_CHECKING:
    from labkit.scaling.capacity import fastest, fewest_ranks, fits, largest_batch
    from labkit.scaling.memory_model import Memory, memory
    from labkit.scaling.published_figures import published

_LATER = {
    "Memory": "memory_model",
    "memory": "memory_model",
    "fastest": "capacity",
    "fewest_ranks": "capacity",
    "fits": "capacity",
    "largest_batch": "capacity",
    "published": "published_figures",
}
"""What needs torch and the GPT, which the cost model does not."""

__all__ = [
    "BACKWARD_SHARE",
    "STRATEGIES",
    "UNKNOWN_NOISE",
    "CostModel",
    "Fit",
    "Memory",
    "Point",
    "Prediction",
    "fastest",
    "fewest_ranks",
    "fit",
    "fits",
    "largest_batch",
    "memory",
    "published",
    "split",
]


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'labkit.scaling' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(importlib.import_module(f"labkit.scaling.{_LATER[name]}"), name)
    globals()[name] = value
    return value
