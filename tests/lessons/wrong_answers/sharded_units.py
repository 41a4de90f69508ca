"""Wrong answers to `sharded_units`, and a piece of what each must be told."""

from course.exercises.sharded_units import EXERCISE
from tests.support.wrong_answers import WrongAnswers

WRONG = WrongAnswers(EXERCISE)


@WRONG("forward of unit 0: its weight has no storage")
def gathers_nothing(units, shards):
    """No hooks."""


# The whole model is there after the first pass.
WRONG.slip(
    "never_frees",
    "forward of unit 1: unit 0's weight still has its storage: free it",
    ("units[i].weight.untyped_storage().resize_(0)", "pass"),
)

# Each for itself.
WRONG.slip("no_prefetch", "is not being gathered meanwhile", ("gather(following)", "pass"))

# Backward the next one is the one before.
WRONG.slip(
    "prefetches_forward_only",
    "backward of unit 2: unit 1 is not being gathered meanwhile",
    ("before(i, i - 1)", "before(i, i + 1)"),
)

# Nothing overlaps.
WRONG.slip("waits_for_each", "all_gather without async_op=True", (", async_op=True", ""), ("gathers[i].wait()", "pass"))

# Computes with what may not be there yet.
WRONG.slip("never_waits", "its gather was not waited for", ("gathers[i].wait()", "pass"))

# No division.
WRONG.slip("sums", "summed, not averaged?", ("shards[i].grad /= dist.get_world_size()", "pass"))

# The rank's own part of its own gradient.
WRONG.slip(
    "reduces_nothing",
    "this rank's gradient alone",
    (
        "dist.reduce_scatter_tensor(shards[i].grad, units[i].weight.grad.flatten())",
        "shards[i].grad = units[i].weight.grad.flatten().chunk(dist.get_world_size())[dist.get_rank()].clone()",
    ),
    ("shards[i].grad /= dist.get_world_size()", "pass"),
)

# As ZeRO-1 does.
WRONG.slip(
    "keeps_whole_gradients", "unit 0's weight still has its whole `grad`", ("units[i].weight.grad = None", "pass")
)

# The first unit stays, for no other comes after it.
WRONG.slip(
    "frees_forward_only",
    "unit 0's weight still has its storage after backward",
    ("resize_(0)", "resize_(0 if shards[0].grad is None else units[i].weight.nbytes)"),
)
