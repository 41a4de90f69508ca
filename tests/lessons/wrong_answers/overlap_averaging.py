"""Wrong answers to `overlap_averaging`, and a piece of what each must be told."""

import torch.distributed as dist

from course.exercises.overlap_averaging import EXERCISE
from tests.support.wrong_answers import WrongAnswers

WRONG = WrongAnswers(EXERCISE)


@WRONG("nothing overlaps")
def all_at_the_end(model):
    """After backward."""

    def finish() -> None:
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()

    return finish


# Right, but one after the other.
WRONG.slip(
    "waits_in_the_hook",
    "all_reduce without async_op=True: backward waits for it",
    (", async_op=True", ""),
    ("work.wait()", "pass"),
)

# The sum.
WRONG.slip("never_divides", "summed, not averaged?", ("parameter.grad /= dist.get_world_size()", "pass"))

# What was begun in the first step is divided again in the second.
WRONG.slip("never_forgets", "in step 1", ("begun.clear()", "pass"))
