"""Wrong answers to `one_forward_one_backward`, and a piece of what each must be told."""

from course.exercises.one_forward_one_backward import one_forward_one_backward
from tests.support.wrong_answers import told


@told("ticks, expected")
def one_at_a_time(stage, stages, micro_batches):
    """As the last stage, on every stage."""
    return [(kind, i) for i in range(micro_batches) for kind in "FB"]


@told("is missing")
def forgets_the_last_backwards(stage, stages, micro_batches):
    """It stops when no forward is left."""
    order = one_forward_one_backward(stage, stages, micro_batches)
    return order[: len(order) - (stages - stage - 1)]


# Fewer micro-batches than stages.

# Off by one in the warm-up.


@told("comes before")
def backward_first(stage, stages, micro_batches):
    """The order within a pair."""
    return [(kind, i) for i in range(micro_batches) for kind in "BF"]


@told("keeps 3 activations after ('F', 2), expected 2 at most")
def gpipe(stage, stages, micro_batches):
    """All forward, then all backward."""
    return [("F", i) for i in range(micro_batches)] + [("B", i) for i in range(micro_batches)]
