"""Exercise: what the fullest rank holds of weights, gradients and optimizer state, by the plan."""

from __future__ import annotations

import math

from course.exercises.base import Exercise
from course.exercises.trial import Trial

EXERCISE = Exercise(
    lesson="25",
    title="Bytes per rank",
    statement="""
    Tensor parallel splits every layer of a model over `tp` ranks, a pipeline its layers into `pp` stages, and `dp`
    ranks have the same part, each with its share of the batch. Of what these `dp` ranks have, `zero_stage` 0 shards
    nothing (DDP), 1 the optimizer's state, 2 the gradients too, 3 the weights too (FSDP).

    Each of `parameters` takes `weight` bytes, its gradient `gradient` and the optimizer's state `state`. Return the
    bytes of all three on one rank, a `float`. Everything divides evenly.
    """,
    hints=(
        "First the parameters of one part of the model: what tensor parallel and the pipeline leave.",
        "Then each of the three by itself: is it divided by `dp` at this stage?",
        "A stage includes the ones before it: with ZeRO-2 the optimizer's state is sharded as well.",
    ),
    why="Tensor and pipeline parallel divide all three; ZeRO divides one more of them with each stage, by the number "
    "of ranks that would hold copies.",
    world_sizes=(),
    imports=(),
    cases=tuple(
        {"parameters": count, "dp": dp, "tp": tp, "pp": pp, "zero_stage": stage, "weight": w, "gradient": g, "state": s}
        for count, dp, tp, pp, w, g, s in ((7e9, 8, 1, 1, 2, 2, 12), (70e9, 4, 8, 2, 2, 4, 12), (1e6, 2, 2, 2, 4, 4, 8))
        for stage in (0, 1, 2, 3)
    ),
)


@EXERCISE.reference
def bytes_per_rank(parameters, dp, tp, pp, zero_stage, weight=2, gradient=2, state=12):
    """Return the bytes of weights, gradients and optimizer state on one rank."""
    part = parameters / (tp * pp)
    state_bytes = part * state / (dp if zero_stage >= 1 else 1)
    gradient_bytes = part * gradient / (dp if zero_stage >= 2 else 1)
    weight_bytes = part * weight / (dp if zero_stage >= 3 else 1)
    return weight_bytes + gradient_bytes + state_bytes


@EXERCISE.trial
def trial(
    t: Trial,
    parameters: float,
    dp: int,
    tp: int,
    pp: int,
    zero_stage: int,
    weight: int,
    gradient: int,
    state: int,
) -> None:
    """Call it, and compare it with sums of parts."""
    sizes = () if (weight, gradient, state) == (2, 2, 12) else (weight, gradient, state)  # its own, by default
    found = t.call(parameters, dp, tp, pp, zero_stage, *sizes)
    t.require(isinstance(found, (float, int)), f"returned a {type(found).__name__}, expected a float")
    sharded = (zero_stage >= 3, zero_stage >= 2, zero_stage >= 1)
    each = (weight, gradient, state)
    part = parameters / tp / pp
    expected = sum(part * size / (dp if is_sharded else 1) for size, is_sharded in zip(each, sharded, strict=True))
    known = {
        expected * tp * pp: ": tensor parallel and the pipeline divide all three",
        part * sum(each) / dp: ": a stage below 3 shards only some of the three",
        part * sum(each): ": what the stage shards is divided by dp",
        sum(
            part * size / (dp if stage == zero_stage else 1) for size, stage in zip(each, (3, 2, 1), strict=True)
        ): ": a stage includes those before it",
        sum(
            part * size / (dp if stage <= zero_stage else 1) for size, stage in zip(each, (1, 2, 3), strict=True)
        ): ": ZeRO-1 shards the optimizer's state first, and the weights last",
    }
    is_right = math.isclose(found, expected, rel_tol=1e-9)
    said = next((text for value, text in known.items() if math.isclose(value, found, rel_tol=1e-9)), "")
    t.require(is_right, f"it is {found:.6g} bytes, expected {expected:.6g}{said}")
