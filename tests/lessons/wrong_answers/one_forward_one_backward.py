"""Wrong answers to `one_forward_one_backward`, and a piece of what each must be told."""

from course.exercises.one_forward_one_backward import EXERCISE, one_forward_one_backward
from tests.support.wrong_answers import WrongAnswers

WRONG = WrongAnswers(EXERCISE)


@WRONG("keeps 3 activations after ('F', 2), expected 2 at most")
def gpipe(stage, stages, micro_batches):
    """All forward, then all backward."""
    return [("F", i) for i in range(micro_batches)] + [("B", i) for i in range(micro_batches)]


@WRONG("ticks, expected")
def one_at_a_time(stage, stages, micro_batches):
    """As the last stage, on every stage."""
    return [(kind, i) for i in range(micro_batches) for kind in "FB"]


@WRONG("is missing")
def forgets_the_last_backwards(stage, stages, micro_batches):
    """It stops when no forward is left."""
    order = one_forward_one_backward(stage, stages, micro_batches)
    return order[: len(order) - (stages - stage - 1)]


# Fewer micro-batches than stages.
WRONG.slip(
    "warms_up_with_what_is_not_there",
    "is no pass of 1 micro-batches",
    ("min(stages - stage - 1, micro_batches)", "stages - stage - 1"),
)

# Off by one in the warm-up.
WRONG.slip(
    "one_too_many", "keeps 3 activations after ('F', 2), expected 2 at most", ("stages - stage - 1", "stages - stage")
)


@WRONG("comes before")
def backward_first(stage, stages, micro_batches):
    """The order within a pair."""
    return [(kind, i) for i in range(micro_batches) for kind in "BF"]
