"""Exercise: two linear layers, cut by columns and by rows."""

from __future__ import annotations

import torch
import torch.distributed as dist

from course.exercises.base import Cost, Exercise
from course.exercises.trial import Trial

EXERCISE = Exercise(
    lesson="21",
    title="Column-parallel, then row-parallel",
    statement="""
    The network is `outputs = relu(inputs @ first.T) @ second.T + bias`. The hidden units are shared out: each rank
    has its rows of `first` and the columns of `second` that belong to the same units; `bias` it has whole, and all
    ranks have the same `inputs`. Return the whole outputs on every rank, with a single `dist.all_reduce`.
    """,
    hints=(
        "A rank can compute its own hidden units, relu included, from the inputs alone.",
        "What its units contribute to the outputs has the outputs' shape; the contributions add up.",
        "How often is the bias in the sum if every rank adds it before?",
    ),
    why="Relu works on each hidden unit alone, so nothing need be exchanged between the layers, and the sum over "
    "hidden units is one all-reduce.",
    allowed=("all_reduce",),
    cases=(
        {"batch": 3, "features": 4, "hidden": 2, "outputs": 5},
        {"batch": 1, "features": 2, "hidden": 3, "outputs": 1},
    ),
)


@EXERCISE.reference
def parallel_mlp(inputs, first, second, bias):
    """Return (batch, outputs). `first` is (hidden / n, features), `second` (outputs, hidden / n), `bias` (outputs,)."""
    hidden = torch.relu(inputs @ first.T)
    outputs = hidden @ second.T
    dist.all_reduce(outputs)
    return outputs + bias


@EXERCISE.trial
def trial(t: Trial, batch: int, features: int, hidden: int, outputs: int) -> None:
    """Call it, and compare with the network in one piece."""
    n = t.world_size
    inputs = t.numbers(batch, features, of=0, salt="inputs") - 50
    bias = t.numbers(outputs, of=0, salt="bias")
    firsts = [t.numbers(hidden, features, of=rank, salt="first") - 50 for rank in range(n)]
    seconds = [t.numbers(outputs, hidden, of=rank, salt="second") - 50 for rank in range(n)]
    product = inputs @ torch.cat(firsts).T
    whole = torch.relu(product) @ torch.cat(seconds, 1).T
    given = inputs.clone()
    found = t.call(given, firsts[t.rank].clone(), seconds[t.rank].clone(), bias.clone())
    known = {
        "the relu is missing": product @ torch.cat(seconds, 1).T + bias,
        "the bias is missing": whole,
    }
    known["the bias is added once on every rank"] = whole + n * bias
    known["this rank's hidden units only"] = torch.relu(inputs @ firsts[t.rank].T) @ seconds[t.rank].T + bias
    known["averaged, where the contributions add up"] = whole / n + bias
    t.equal("outputs", found, whole + bias, None, known)
    t.unchanged("inputs", given, inputs)
    calls, sent = t.traffic.count("all_reduce"), t.traffic.bytes_sent
    t.require(calls <= 1, f"called all_reduce {calls} times, expected once")
    least = best(n, batch, features, hidden, outputs).bytes
    t.require(sent <= least, f"all-reduces more than the outputs: {sent} B sent, expected {least} B")


@EXERCISE.best
def best(world_size: int, batch: int, features: int, hidden: int, outputs: int) -> Cost:
    """Return one all-reduce of the outputs."""
    return Cost.all_reduce(4 * batch * outputs, world_size)
