"""Wrong answers to `bytes_per_rank`, and a piece of what each must be told."""

from course.exercises.bytes_per_rank import EXERCISE
from tests.support.wrong_answers import WrongAnswers

WRONG = WrongAnswers(EXERCISE)

# One device's share of everything.
WRONG.slip(
    "always_all_three",
    "a stage below 3 shards only some",
    ("zero_stage >= 1", "True"),
    ("zero_stage >= 2", "True"),
    ("zero_stage >= 3", "True"),
)

# A plan without tp and pp.
WRONG.slip("whole_model", "divide all three", ("parameters / (tp * pp)", "parameters"))

# Each stage by itself.
WRONG.slip(
    "one_stage_only",
    "a stage includes those before it",
    ("zero_stage >= 1", "zero_stage == 1"),
    ("zero_stage >= 2", "zero_stage == 2"),
    ("zero_stage >= 3", "zero_stage == 3"),
)

# Weights first.
WRONG.slip(
    "weights_first",
    "and the weights last",
    ("state / (dp if zero_stage >= 1", "state / (dp if zero_stage >= 4 - 1"),
    ("weight / (dp if zero_stage >= 3", "weight / (dp if zero_stage >= 1"),
)

# DDP, whatever the stage.
WRONG.slip(
    "never_sharded",
    "is divided by dp",
    ("zero_stage >= 1", "False"),
    ("zero_stage >= 2", "False"),
    ("zero_stage >= 3", "False"),
)
