"""Wrong answers to `checkpoint_interval`, and a piece of what each must be told."""

from course.exercises.checkpoint_interval import EXERCISE, checkpoint_interval
from tests.support.wrong_answers import WrongAnswers

WRONG = WrongAnswers(EXERCISE)

# The more machines, the sooner one fails.
WRONG.slip(
    "of_one_machine", "how often does one of all machines fail?", ("machine_mtbf_s / machines", "machine_mtbf_s")
)


@WRONG("a failure loses half of the interval, not all of it")
def all_is_lost(save_s, machine_mtbf_s, machines):
    """The worst case."""
    return checkpoint_interval(save_s / 2, machine_mtbf_s, machines)


# Half of it.
WRONG.slip("saving_only", "that is without what is trained again", (" + interval_s / (2 * between_failures_s)", ""))


@WRONG("saving a little more often loses less")
def once_per_failure(save_s, machine_mtbf_s, machines):
    """As often as machines fail."""
    return machine_mtbf_s / machines, save_s / machine_mtbf_s * machines


# Half of the answer.
WRONG.slip(
    "interval_only",
    "returned a float, expected (interval_s, lost)",
    ("return interval_s, save_s / interval_s + interval_s / (2 * between_failures_s)", "return interval_s"),
)
