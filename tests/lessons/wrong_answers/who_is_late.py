"""Wrong answers to `who_is_late`, and a piece of what each must be told."""

from statistics import median

from course.exercises.who_is_late import EXERCISE, who_is_late
from tests.support.wrong_answers import WrongAnswers

WRONG = WrongAnswers(EXERCISE)

# How far ranks are apart, not what the run would gain.
WRONG.slip("after_the_first", "how late it is to the first of the others", ("max(others)", "min(others)"))


@WRONG("that is the worst step, not the median")
def by_its_worst_step(entered):
    """The right rank, and its worst step."""
    rank, _ = who_is_late(entered)
    return rank, max(step[rank] - max(step[:rank] + step[rank + 1 :]) for step in entered)


@WRONG("it is rank 0, expected rank 2")
def who_waits(entered):
    """The rank that comes first has the longest all-reduce."""
    late = [median(max(step) - step[rank] for step in entered) for rank in range(len(entered[0]))]
    return late.index(max(late)), max(late)


# Half of it.
WRONG.slip(
    "the_rank_alone",
    "expected a pair: the rank, and seconds",
    ("late.index(max(late)), max(late)", "late.index(max(late))"),
)
