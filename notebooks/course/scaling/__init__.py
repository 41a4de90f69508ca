"""What a training would take on ranks that are not there, calculated: how long a step is, and what a rank holds.

    cost_model         how long a step is on any number of ranks, fitted to a few measured steps
    memory_model       bytes by part and rank, for every strategy of `course.transformer`
    rank_memory        the same of any module
    capacity           the largest batch that fits, the fewest ranks, the fastest of those that fit
    published_figures  what others say of their models, against what is predicted for them

Below them, `local_parts` is what of a GPT a rank has, `counting` what its forward pass keeps, `fake_steps` a step on
tensors without memory, `parameters` who has which parameters, `schedules` in which order a pipeline's rank takes its
micro-batches, and what it holds of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from labkit.protocol.lazy import lazy_names

if TYPE_CHECKING:  # `as` tells type checkers that a name is public
    from course.scaling.capacity import fastest as fastest
    from course.scaling.capacity import fewest_ranks as fewest_ranks
    from course.scaling.capacity import fits as fits
    from course.scaling.capacity import largest_batch as largest_batch
    from course.scaling.cost_model import CostModel as CostModel
    from course.scaling.cost_model import Point as Point
    from course.scaling.cost_model import fit as fit
    from course.scaling.memory_model import predict_memory as predict_memory
    from course.scaling.published_figures import published as published
    from course.scaling.rank_memory import Memory as Memory

_HOMES = {
    **dict.fromkeys(("fastest", "fewest_ranks", "fits", "largest_batch"), "capacity"),
    **dict.fromkeys(("CostModel", "Point", "fit"), "cost_model"),
    "Memory": "rank_memory",
    "predict_memory": "memory_model",
    "published": "published_figures",
}

__all__ = [*_HOMES]

__getattr__ = lazy_names(__name__, _HOMES, {})
