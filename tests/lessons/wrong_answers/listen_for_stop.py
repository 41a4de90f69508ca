"""Wrong answers to `listen_for_stop`, and a piece of what each must be told."""

from course.exercises.listen_for_stop import EXERCISE
from tests.support.wrong_answers import WrongAnswers

WRONG = WrongAnswers(EXERCISE)

# No agreement: the others go on.
WRONG.slip("each_for_itself", "had been told", ("dist.all_reduce(flag)", "pass"))

# Half of the signals.
WRONG.slip(
    "only_sigterm",
    "SIGUSR1 came in step 0, and nothing handled it",
    ("signal.SIGTERM, signal.SIGUSR1", "signal.SIGTERM,"),
)

# MIN in place of MAX.
WRONG.slip(
    "only_if_all_are_told",
    "after step 2 it is False, expected True: rank 1 had been told",
    ("dist.all_reduce(flag)", "dist.all_reduce(flag, dist.ReduceOp.MIN)"),
)

# A collective on one rank only.
WRONG.slip("asks_only_when_told", "a hang: rank", ("dist.all_reduce(flag)", "told and dist.all_reduce(flag)"))

# In the midst of a step.
WRONG.slip(
    "agrees_in_the_handler",
    "communicates in the handler, where the other ranks do not",
    ("told.append(number)", "dist.all_reduce(torch.tensor(1))"),
)

# In the midst of a step, and alone.
WRONG.slip("leaves_in_the_handler", "left by exit()", ("told.append(number)", "exit()"))

# No bool.
WRONG.slip("returns_the_flag", "returned a Tensor, expected True or False", ("flag.item() > 0", "flag > 0"))

# Listens only.
WRONG.slip("returns_nothing", "returned a NoneType, expected a function", ("return has_to_stop", "has_to_stop"))
