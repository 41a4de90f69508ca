"""Wrong answers to `checkpoint_interval`, and a piece of what each must be told."""

from course.exercises.checkpoint_interval import checkpoint_interval
from tests.support.wrong_answers import told

# The more machines, the sooner one fails.


@told("a failure loses half of the interval, not all of it")
def all_is_lost(save_s, machine_mtbf_s, machines):
    """The worst case."""
    return checkpoint_interval(save_s / 2, machine_mtbf_s, machines)


# Half of it.


@told("saving a little more often loses less")
def once_per_failure(save_s, machine_mtbf_s, machines):
    """As often as machines fail."""
    return machine_mtbf_s / machines, save_s / machine_mtbf_s * machines


# Half of the answer.
