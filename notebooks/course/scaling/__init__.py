"""What a training would take on ranks that are not there, calculated: how long a step is, and what a rank holds.

    cost_model         how long a step is on any number of ranks, fitted to a few measured steps
    memory_model       bytes by part and rank, of a GPT for every strategy of `course.transformer`
    any_module         the same of any module, for DDP, ZeRO-1 and FSDP2
    capacity           the largest batch that fits, the fewest ranks
    published_figures  what others say of their models, against what is predicted for them

Below them, `parts` are the parts of a rank's memory, `local_parts` is what of a GPT a rank has, `counting` what a
forward pass keeps, `parameters` who has which parameters, `schedules` in which order a pipeline's rank takes its
micro-batches, and what it holds of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from labkit.protocol.lazy import lazy_names

if TYPE_CHECKING:  # `as` tells type checkers that a name is public
    from course.scaling.capacity import fewest_ranks as fewest_ranks
    from course.scaling.capacity import fits as fits
    from course.scaling.capacity import largest_batch as largest_batch
    from course.scaling.cost_model import CostModel as CostModel
    from course.scaling.cost_model import Point as Point
    from course.scaling.cost_model import fit as fit
    from course.scaling.memory_model import predict_memory as predict_memory
    from course.scaling.parts import Memory as Memory
    from course.scaling.published_figures import published as published

_HOMES = {
    **dict.fromkeys(("fewest_ranks", "fits", "largest_batch"), "capacity"),
    **dict.fromkeys(("CostModel", "Point", "fit"), "cost_model"),
    "Memory": "parts",
    "predict_memory": "memory_model",
    "published": "published_figures",
}

__all__ = [*_HOMES]

__getattr__ = lazy_names(__name__, _HOMES, {})
