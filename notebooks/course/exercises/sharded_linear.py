"""Exercise: one layer of FSDP."""

from __future__ import annotations

import torch
import torch.distributed as dist

from course.exercises.base import Cost, Exercise
from course.exercises.trial import Trial

EXERCISE = Exercise(
    lesson="19",
    title="All-gather and reduce-scatter for one layer",
    statement="""
    What FSDP does with a layer `outputs = inputs @ weight.T`. Of the weight (of shape `shape`), flattened, each rank
    keeps only its `shard`, the rank-th of n equal parts. Put it together with `dist.all_gather_into_tensor`, compute
    the outputs, then the weight's gradient from `output_gradient`, and leave each rank with its shard of the *mean*
    gradient by `dist.reduce_scatter_tensor`.

    Return both: (outputs, shard_gradient). Inputs and gradients differ from rank to rank. `shard` stays as it is.
    """,
    hints=(
        "`weight = torch.empty(shape)`, and gather into `weight.view(-1)`.",
        "The gradient of the weight is `output_gradient.T @ inputs`, of the weight's own shape.",
        "`reduce_scatter_tensor(output, input)` adds up; both are flat, and the input must be contiguous.",
    ),
    why="The whole weight is there only while the layer computes, and of the gradient each rank needs only what "
    "it updates.",
    allowed=("reduce_scatter_tensor", "all_gather_into_tensor"),
    cases=({"rows": 3, "columns": 2, "batch": 4}, {"rows": 1, "columns": 5, "batch": 2}),
)


@EXERCISE.reference
def sharded_linear(shard, shape, inputs, output_gradient, world_size):
    """Return outputs (batch, rows) and the shard of the mean gradient; `shard` is flat, `shape` (rows, columns)."""
    weight = torch.empty(shape)
    dist.all_gather_into_tensor(weight.view(-1), shard)
    outputs = inputs @ weight.T
    gradient = output_gradient.T @ inputs
    shard_gradient = torch.empty_like(shard)
    dist.reduce_scatter_tensor(shard_gradient, gradient.flatten())
    return outputs, shard_gradient / world_size


@EXERCISE.trial
def trial(t: Trial, rows: int, columns: int, batch: int) -> None:
    """Call it, and compare with a whole weight."""
    n = t.world_size
    shape = (rows * n, columns)
    weight = t.numbers(*shape, of=0)
    inputs = [t.numbers(batch, columns, of=rank, salt="inputs") for rank in range(n)]
    gradients = [t.numbers(batch, rows * n, of=rank, salt="gradients") for rank in range(n)]
    shard = weight.flatten().chunk(n)[t.rank].clone()
    before = shard.clone()
    found = t.call(shard, shape, inputs[t.rank].clone(), gradients[t.rank].clone(), n)
    t.returned(found, "(outputs, shard_gradient)")
    t.unchanged("shard", shard, before)
    t.equal("outputs", found[0], inputs[t.rank] @ weight.T)
    each = [gradient.T @ x for gradient, x in zip(gradients, inputs, strict=True)]
    total = torch.stack(each).sum(0).flatten().chunk(n)[t.rank]
    known = {
        "summed, not averaged?": total,
        "this rank's gradient alone": each[t.rank].flatten().chunk(n)[t.rank],
        "the gradient's shard of rank 0": torch.stack(each).mean(0).flatten().chunk(n)[0],
    }
    t.equal("shard_gradient", found[1], total / n, None, known)


@EXERCISE.best
def best(world_size: int, rows: int, columns: int, batch: int) -> Cost:
    """Return one gather, one reduce-scatter."""
    return Cost(2, 2 * (4 * rows * columns * (world_size - 1)))
