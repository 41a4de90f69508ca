"""In which order a rank of a pipeline takes its micro-batches forward and back, and what it holds meanwhile.

GPipe: Huang et al. 2019. 1F1B: Narayanan et al. 2019; interleaved: Narayanan et al. 2021. Zero bubble: Qi et al. 2023.
As `torch.distributed.pipelining.schedules` has them (PyTorch 2.15). An action is written as there: F is a forward pass,
B a backward pass; I and W are its two halves, for the gradients of the inputs and then for those of the weights.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from course.replay import pytorch_schedule


class Action(NamedTuple):
    """One thing that a rank does."""

    what: str
    """F, B, I or W; or SEND_F, RECV_F, of features, and back, SEND_B, RECV_B, of their gradients."""
    stage: int
    micro_batch: int


class Kept(NamedTuple):
    """What one stage keeps of one micro-batch, in bytes."""

    forward: int
    """After F."""
    most_between: int = 0
    """At the end of I, when the gradients are there from which W is to begin, and all the rest still is."""
    between: int = 0
    """From I to W."""


@functools.cache
def orders(schedule: str, ranks: int, micro_batches: int, stages: int) -> list[list[Action]]:
    """Return what each rank does in a step, in this order, by the name of PyTorch's schedule; `stages` on each rank.

    Those of several stages are PyTorch's own orders, messages and all. Raises ValueError for an unknown schedule, and
    where PyTorch has no such order.
    """
    if schedule in ("ScheduleGPipe", "Schedule1F1B"):
        ahead = [micro_batches if schedule == "ScheduleGPipe" else min(micro_batches, ranks - r) for r in range(ranks)]
        return [_one_stage(rank, micro_batches, ahead[rank]) for rank in range(ranks)]
    if schedule not in ("ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble"):
        raise ValueError(f"known are GPipe, 1F1B, interleaved 1F1B and zero bubble of PyTorch, got {schedule!r}")
    import torch

    made = pytorch_schedule(schedule, ranks, micro_batches, stages)
    if not hasattr(made, "pipeline_order_with_comms"):
        raise ValueError(f"PyTorch {torch.__version__} does not say when {schedule} sends and receives; 2.15 does")
    return [
        [Action(one.computation_type.value, one.stage_index, one.microbatch_index) for one in order]
        for _, order in sorted(made.pipeline_order_with_comms.items())
    ]


def _one_stage(stage: int, micro_batches: int, ahead: int) -> list[Action]:
    """Return the order with so many forward passes ahead of the backward passes."""
    order = [Action("F", stage, number) for number in range(ahead)]
    for number in range(micro_batches):
        order.append(Action("B", stage, number))
        if ahead + number < micro_batches:
            order.append(Action("F", stage, ahead + number))
    return order


def most_kept(order: Sequence[Action], kept: Mapping[int, Kept]) -> int:
    """Return the most bytes that a rank keeps at any time for backward passes; `kept` by stage."""
    now = most = 0
    for what, stage, _ in order:
        if what == "F":
            now += kept[stage].forward
        elif what == "B":
            now -= kept[stage].forward
        elif what == "I":
            most = max(most, now - kept[stage].forward + kept[stage].most_between)
            now += kept[stage].between - kept[stage].forward
        elif what == "W":
            now -= kept[stage].between
        most = max(most, now)
    return most


def most_messages(schedule: str, order: Sequence[Action], total: int, micro_batches: int) -> int:
    """Return how many micro-batches' features lie in messages at most, on a rank of a pipeline of `total` stages.

    What was received is kept by autograd and counts there, as long as it is. As in GPipe and 1F1B, the last stage's
    inputs stay to the end of interleaved 1F1B, for the losses hold on to them.
    """
    if schedule in ("ScheduleGPipe", "Schedule1F1B"):
        return _most_of_one_stage(schedule, order[0].stage, total, micro_batches)
    there: set[Action] = set()
    most = 0
    for action in order:
        what, stage, number = action
        if what[:4] in ("SEND", "RECV"):
            there.add(action)  # gradients that are sent stay to the end of the step
        elif what == "F":
            there.discard(Action("RECV_F", stage, number))  # now autograd keeps it
        elif what in ("B", "W"):
            # Autograd lets go of the input before the stage does, which has its output, too, and the gradient of that.
            most = max(most, len(there) + (stage > 0))
            there -= {Action("SEND_F", stage, number), Action("RECV_B", stage, number)}
            if what == "B" and stage == total - 1:
                there.add(Action("RECV_F", stage, number))
        most = max(most, len(there))
    return most


def _most_of_one_stage(schedule: str, rank: int, ranks: int, micro_batches: int) -> int:
    """Return how many micro-batches' features lie in messages at most, on a rank of GPipe or 1F1B.

    What was received is kept by autograd and counts there, as long as it is. As PyTorch 2.15 waits for what it sends:
    GPipe, for outputs when all forward passes are over, for gradients when all backward passes are; a rank in the
    middle has one more on its way. 1F1B: with each neighbour one goes while one comes. In both the last stage's inputs
    stay to the end, for the losses hold on to them.
    """
    is_first, is_last = rank == 0, rank == ranks - 1
    if schedule == "ScheduleGPipe":
        return 2 * micro_batches if is_last else micro_batches + (not is_first)
    return micro_batches + 1 if is_last else 2 if is_first else 4
