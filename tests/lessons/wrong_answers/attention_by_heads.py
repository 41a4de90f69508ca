"""Wrong answers to `attention_by_heads`, and a piece of what each must be told."""

import torch
import torch.distributed as dist

from course.exercises.attention_by_heads import EXERCISE, _alone
from tests.support.wrong_answers import WrongAnswers

WRONG = WrongAnswers(EXERCISE)

# Part of the sum.
WRONG.slip("no_communication", "this rank's heads only", ("dist.all_reduce(outputs)", "pass"))

# No mask.
WRONG.slip("not_causal", "positions see later ones, too", ("is_causal=True", "is_causal=False"))

# Softmax over what several heads say together.
WRONG.slip("one_broad_head", "all heads were taken for one", ("-1, head_width)", "1, -1)"))

# As for gradients.
WRONG.slip(
    "averages",
    "averaged, where the heads' contributions add up",
    ("return outputs", "return outputs / dist.get_world_size()"),
)


@WRONG("calls dist.all_gather, which this exercise does not allow")
def gathers_the_heads(x, query, key, value, out, head_width):
    """More than need be."""
    parts = [torch.empty_like(out) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, out)
    return _alone(x, (query, key, value), out, head_width)
