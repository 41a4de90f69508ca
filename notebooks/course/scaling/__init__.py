"""Whether ranks can hold a training, and which way to train is the fastest of those that fit: calculated, with no rank.

    memory_model       bytes by part and rank, for every strategy of `course.transformer`
    capacity           the largest batch that fits, the fewest ranks, the fastest of those that fit
    published_figures  what others say of their models, against what is predicted for them

Below them, `local_parts` is what of a GPT a rank has, `counting` what its forward pass keeps, `schedules` in which
order a pipeline's rank takes its micro-batches, and what it holds of them. What is not about GPTs is in
`labkit.scaling`: tensors without memory, who has which parameters, how long a step takes.
"""

from __future__ import annotations

from course.scaling.capacity import fastest, fewest_ranks, fits, largest_batch
from course.scaling.memory_model import predict_memory
from course.scaling.published_figures import published
from labkit.scaling import Memory

__all__ = ["Memory", "fastest", "fewest_ranks", "fits", "largest_batch", "predict_memory", "published"]
