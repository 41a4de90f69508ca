"""Wrong answers to `choose_by_bias`, and a piece of what each must be told."""

from course.exercises.choose_by_bias import EXERCISE
from tests.support.wrong_answers import WrongAnswers

WRONG = WrongAnswers(EXERCISE)

# The bias moves, and nobody looks at it.
WRONG.slip("without_bias", "chosen by the scores without the bias", ("(scores + bias).topk", "scores.topk"))

# Seldom chosen experts count for more than they should.
WRONG.slip(
    "gates_with_bias", "the bias has a part in the gates", ("gates = scores.gather", "gates = (scores + bias).gather")
)

# The scores as they are.
WRONG.slip("not_divided", "which do not add up to 1 yet", ("gates / gates.sum(1, keepdim=True)", "gates"))

# The ranks' routers drift apart.
WRONG.slip("of_this_rank", "by the choices of this rank only", ("dist.all_reduce(load)", "pass"))

# One expert gets all in the end.
WRONG.slip("the_wrong_way", "the popular go up, the others down", ("bias + speed", "bias - speed"))

# Steps of any size.
WRONG.slip("by_the_difference", "moved by the difference, not by its sign", (".sign()", ""))

# The given tensor moves.
WRONG.slip(
    "in_place",
    "`bias` was changed",
    ("bias + speed * (load.mean() - load).sign()", "bias.add_(speed * (load.mean() - load).sign())"),
)
