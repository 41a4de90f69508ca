"""Exercise: 6 N D, and the share of the hardware that a training uses (MFU)."""

from __future__ import annotations

import math

from course.exercises.base import Exercise
from course.exercises.trial import Trial

EXERCISE = Exercise(
    lesson="25",
    title="Model FLOPs utilization",
    statement="""
    A GPT trains at `tokens_per_s` on some devices, each of which can do `peak_flops` operations per
    second. Return two numbers: the operations of a training step per token, and the *model FLOPs
    utilization*, MFU: the operations that the model needs in a second, as a share of what all devices
    can do.

    A multiplication and an addition are two operations. Forward, each of the weights that matrices hold
    (`weights`) is used once per token; and in each of `depth` layers attention multiplies `width`
    features with all `sequence` positions twice, for the scores and for the values. Backward costs
    twice as much as forward. Nothing is recomputed.
    """,
    hints=(
        "Forward: 2 operations per weight, and 2 · 2 · sequence · width per layer for attention.",
        "Backward takes gradients for the inputs and for the weights, so all of a step is three times forward.",
        "6 · weights + 12 · depth · width · sequence per token; and the devices are as many times the peak.",
    ),
    why="Forward is 2 N + 4 · depth · width · sequence operations per token, and backward twice that: the 6 N of "
    "“6 N D”, and attention.",
    world_sizes=(),
    imports=(),
    cases=(
        {
            "weights": 124e6,
            "depth": 12,
            "width": 768,
            "sequence": 1024,
            "tokens_per_s": 2e5,
            "devices": 1,
            "peak_flops": 3e14,
        },
        {
            "weights": 175e9,
            "depth": 96,
            "width": 12288,
            "sequence": 2048,
            "tokens_per_s": 1.4e5,
            "devices": 1024,
            "peak_flops": 3.12e14,
        },
        {
            "weights": 1e6,
            "depth": 3,
            "width": 64,
            "sequence": 32768,
            "tokens_per_s": 1e3,
            "devices": 4,
            "peak_flops": 1e12,
        },
    ),
)


@EXERCISE.reference
def flops_utilization(weights, depth, width, sequence, tokens_per_s, devices, peak_flops):
    """Return (operations of a training step per token, share of the devices' operations that these are)."""
    per_token = 6 * weights + 12 * depth * width * sequence
    return per_token, per_token * tokens_per_s / (devices * peak_flops)


@EXERCISE.trial
def trial(
    t: Trial,
    weights: float,
    depth: int,
    width: int,
    sequence: int,
    tokens_per_s: float,
    devices: int,
    peak_flops: float,
) -> None:
    """Call it, and count."""
    found = t.call(weights, depth, width, sequence, tokens_per_s, devices, peak_flops)
    t.returned(found, "(operations per token, MFU)")
    per_token, share = found
    matrices, attention = 2 * weights, 2 * 2 * sequence * width * depth
    expected = 3 * (matrices + attention)
    known = {
        3 * matrices: ": attention is missing, which has no weights of its own",
        matrices + attention: ": that is the forward pass alone",
        2 * (matrices + attention): ": backward costs twice as much as forward",
        expected / 2: ": a multiplication and an addition are two",
    }
    said = next((text for value, text in known.items() if math.isclose(value, per_token, rel_tol=1e-6)), "")
    is_right = math.isclose(per_token, expected, rel_tol=1e-6)
    t.require(is_right, f"a token takes {per_token:.6g} operations, expected {expected:.6g}{said}")
    right = expected * tokens_per_s / devices / peak_flops
    said = ": of all devices, not of one" if devices > 1 and math.isclose(share, right * devices, rel_tol=1e-6) else ""
    t.require(math.isclose(share, right, rel_tol=1e-6), f"the MFU is {share:.4g}, expected {right:.4g}{said}")
