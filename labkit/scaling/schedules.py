"""In which order a rank of a pipeline takes its micro-batches forward and back, and so how many it holds at once.

GPipe: Huang et al. 2019. 1F1B: Narayanan et al. 2019; interleaved: Narayanan et al. 2021. As
`torch.distributed.pipelining.schedules` has them. Zero bubble is not here: it keeps far more than its order says.
"""

from __future__ import annotations

from collections.abc import Sequence

FORWARD, BACKWARD = "forward", "backward"

Action = tuple[str, int]
"""What is done, and with which of the rank's own stages: 0, 1, …"""


def actions(schedule: str, ranks: int, rank: int, micro_batches: int, stages: int) -> list[Action]:
    """Return what a rank does in a step, in this order, by the name of PyTorch's schedule.

    Raises ValueError for a schedule that is not known here.
    """
    if schedule == "ScheduleGPipe":
        return [(FORWARD, 0)] * micro_batches + [(BACKWARD, 0)] * micro_batches
    if schedule == "Schedule1F1B":
        ahead = min(micro_batches, ranks - rank)
        steady = [(BACKWARD, 0), (FORWARD, 0)] * (micro_batches - ahead)
        return [(FORWARD, 0)] * ahead + steady + [(BACKWARD, 0)] * ahead
    if schedule != "ScheduleInterleaved1F1B":
        raise ValueError(f"known are GPipe, 1F1B and interleaved 1F1B of PyTorch, got {schedule!r}")
    return interleaved(ranks, rank, micro_batches, stages)


def interleaved(ranks: int, rank: int, micro_batches: int, stages: int) -> list[Action]:
    """Return the order of 1F1B with several stages on each rank, which take micro-batches in rounds."""
    each_round = micro_batches // max(1, micro_batches // ranks)
    total = stages * micro_batches
    ahead = min(total, (stages - 1) * each_round + 2 * (ranks - 1 - rank))
    order: list[Action] = []
    for number in range(total + ahead):
        if number < total:
            order.append((FORWARD, number // each_round % stages))
        if number >= ahead:
            order.append((BACKWARD, stages - 1 - (number - ahead) // each_round % stages))
    return order


def most_held(order: Sequence[Action], kept: Sequence[int]) -> int:
    """Return the most bytes that a rank holds at any time, of which each stage's forward pass keeps so many."""
    now = most = 0
    for what, stage in order:
        now += kept[stage] if what == FORWARD else -kept[stage]
        most = max(most, now)
    return most


def most_messages(schedule: str, order: Sequence[Action], own: Sequence[int], total: int, micro_batches: int) -> int:
    """Return how many micro-batches' features lie in messages at most, on a rank that has the stages `own` of `total`.

    As PyTorch 2.15 waits for what it sends. GPipe: for outputs when all forward passes are over, for gradients when all
    backward passes are; a rank in the middle has one more on its way. 1F1B: with each neighbour one goes while one
    comes. Interleaved: an output goes with its backward pass, gradients stay to the end of the step, and two messages
    are about to arrive (measured, up to three more). What is received is kept by autograd and counts there, until the
    backward pass; the last stage's inputs stay to the end, for the losses hold on to them.
    """
    is_first, is_last = 0 in own, total - 1 in own
    if schedule == "ScheduleGPipe":
        return 2 * micro_batches if is_last else micro_batches + (not is_first)
    if schedule == "Schedule1F1B":
        return micro_batches + 1 if is_last else 2 if is_first else 4
    now = most = 0
    for what, stage in order:
        first, last = own[stage] == 0, own[stage] == total - 1
        # Backward, an output goes and a gradient is sent; of the last stage, the input stays.
        now += not last if what == FORWARD else (not first) - (not last) + last
        most = max(most, now)
    return most + 2
