"""Wrong answers to `begin_saving`, and a piece of what each must be told."""

from course.exercises.begin_saving import EXERCISE, begin_saving
from tests.support.wrong_answers import WrongAnswers

WRONG = WrongAnswers(EXERCISE)

# References.
WRONG.slip("takes_no_copy", "that is the state of a later step", ("copy.deepcopy(state)", "state"))

# A shallow copy.
WRONG.slip("copies_the_dict", "that is the state of a later step", ("copy.deepcopy(state)", "dict(state)"))

# Forgets that the optimizer's state is changed in place, too.
WRONG.slip(
    "copies_the_weights_only",
    "that is the state of a later step",
    ("copy.deepcopy(state)", '{**state, "model": copy.deepcopy(state["model"])}'),
)


@WRONG("returned only when the state was written")
def waits_for_the_disk(pool, previous, step, state, write):
    """As if there were no thread."""
    future = begin_saving(pool, previous, step, state, write)
    future.result()
    return future


# A copy, but perhaps after the next step.
WRONG.slip(
    "copies_in_the_thread",
    "that is the state of a later step",
    ("write, step, copy.deepcopy(state)", "lambda: write(step, copy.deepcopy(state))"),
)

# Two copies in memory, and perhaps the older one written last.
WRONG.slip(
    "does_not_wait", "began a save without waiting for the result of the one before", ("previous.result()", "pass")
)

# Waits, and raises nothing.
WRONG.slip("loses_the_error", "and no error was raised", ("previous.result()", "previous.exception()"))
