"""Wrong answers to `flops_utilization`, and a piece of what each must be told."""

from course.exercises.flops_utilization import EXERCISE
from tests.support.wrong_answers import WrongAnswers

WRONG = WrongAnswers(EXERCISE)

# The rule of thumb.
WRONG.slip("six_n", "attention is missing, which has no weights of its own", (" + 12 * depth * width * sequence", ""))

# As for inference.
WRONG.slip("forward_only", "that is the forward pass alone", ("6 * weights + 12 *", "2 * weights + 4 *"))

# Two passes.
WRONG.slip(
    "backward_as_forward", "backward costs twice as much as forward", ("6 * weights + 12 *", "4 * weights + 8 *")
)

# MACs.
WRONG.slip("multiplications", "a multiplication and an addition are two", ("6 * weights + 12 *", "3 * weights + 6 *"))

# More than all that there is.
WRONG.slip("of_one_device", "of all devices, not of one", ("(devices * peak_flops)", "peak_flops"))
