"""Wrong answers to `sharded_linear`, and a piece of what each must be told."""

import torch
import torch.distributed as dist

from course.exercises.sharded_linear import EXERCISE, sharded_linear
from tests.support.wrong_answers import WrongAnswers

WRONG = WrongAnswers(EXERCISE)

# No division.
WRONG.slip("sums", "summed, not averaged?", (" / world_size", ""))

# Nothing is reduced.
WRONG.slip(
    "keeps_its_own",
    "this rank's gradient alone",
    (
        "dist.reduce_scatter_tensor(shard_gradient, gradient.flatten())",
        "shard_gradient = gradient.flatten().chunk(world_size)[dist.get_rank()]",
    ),
    (" / world_size", ""),
)

# Every rank gets the whole gradient.
WRONG.slip(
    "reduces_everything",
    "calls dist.all_reduce, which this exercise does not allow",
    ("dist.reduce_scatter_tensor(shard_gradient, gradient.flatten())", "dist.all_reduce(gradient)"),
)


@WRONG("the gradient's shard of rank 0")
def takes_the_wrong_shard(shard, shape, inputs, output_gradient, world_size):
    """Everybody the first."""
    outputs, own = sharded_linear(shard, shape, inputs, output_gradient, world_size)
    whole = torch.empty(shape).flatten()
    dist.all_gather_into_tensor(whole, own)
    return outputs, whole.chunk(world_size)[0].clone()


# Half of it.
WRONG.slip(
    "returns_the_outputs_only",
    "returned a Tensor, expected (outputs, shard_gradient)",
    ("return outputs, shard_gradient / world_size", "return outputs"),
)

# Nothing is gathered.
WRONG.slip(
    "multiplies_by_the_shard", "`outputs` has shape", ("inputs @ weight.T", "inputs @ shard.view(-1, shape[1]).T")
)
