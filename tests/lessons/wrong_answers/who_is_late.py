"""Wrong answers to `who_is_late`, and a piece of what each must be told."""

from statistics import median

from course.exercises.who_is_late import who_is_late
from tests.support.wrong_answers import told

# How far ranks are apart, not what the run would gain.


@told("that is the worst step, not the median")
def by_its_worst_step(entered):
    """The right rank, and its worst step."""
    rank, _ = who_is_late(entered)
    return rank, max(step[rank] - max(step[:rank] + step[rank + 1 :]) for step in entered)


@told("it is rank 0, expected rank 2")
def who_waits(entered):
    """The rank that comes first has the longest all-reduce."""
    late = [median(max(step) - step[rank] for step in entered) for rank in range(len(entered[0]))]
    return late.index(max(late)), max(late)


# Half of it.
