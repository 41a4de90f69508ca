"""In which order a rank of a pipeline takes its micro-batches forward and back, and so how many it holds at once.

GPipe: Huang et al. 2019. 1F1B: Narayanan et al. 2019; interleaved: Narayanan et al. 2021. Zero bubble (ZB1P): Qi et al.
2023. As `torch.distributed.pipelining.schedules` has them.
"""

from __future__ import annotations

from collections.abc import Sequence

FORWARD, BACKWARD, WEIGHTS = "forward", "backward", "weights"

Action = tuple[str, int]
"""What is done, and with which of the rank's own stages: 0, 1, …"""


def actions(schedule: str, ranks: int, rank: int, micro_batches: int, stages: int) -> list[Action]:
    """Return what a rank does in a step, in this order, by the name of PyTorch's schedule.

    "backward" of zero bubble is that of the inputs; all that "weights" needs stays until then. Raises ValueError for a
    schedule that is not known here.
    """
    if schedule == "ScheduleGPipe":
        return [(FORWARD, 0)] * micro_batches + [(BACKWARD, 0)] * micro_batches
    if schedule == "Schedule1F1B":
        ahead = min(micro_batches, ranks - rank)
        steady = [(BACKWARD, 0), (FORWARD, 0)] * (micro_batches - ahead)
        return [(FORWARD, 0)] * ahead + steady + [(BACKWARD, 0)] * ahead
    if schedule not in ("ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble"):
        raise ValueError(f"known are GPipe, 1F1B, interleaved 1F1B and zero bubble of PyTorch, got {schedule!r}")
    return looped(ranks, rank, micro_batches, stages, schedule == "ScheduleInterleavedZeroBubble")


def looped(ranks: int, rank: int, micro_batches: int, stages: int, zero_bubble: bool) -> list[Action]:
    """Return the order of schedules with several stages on each rank, which take micro-batches in rounds."""
    each_round = micro_batches // max(1, micro_batches // ranks)
    total = stages * micro_batches
    ahead = min(total, (stages - 1) * each_round + (1 if zero_bubble else 2) * (ranks - 1 - rank))
    order: list[Action] = []
    awaiting: list[int] = []  # stages whose weights' gradients are still to be computed
    for number in range(total + ahead):
        if number < total:
            order.append((FORWARD, number // each_round % stages))
        if number >= ahead:
            back = stages - 1 - (number - ahead) // each_round % stages
            order.append((BACKWARD, back))
            awaiting.append(back)
            if zero_bubble and number - ahead >= rank:
                order.append((WEIGHTS, awaiting.pop(0)))
    if zero_bubble:
        order += [(WEIGHTS, stage) for stage in awaiting]
    return order


def most_held(order: Sequence[Action], kept: Sequence[int], loss: Sequence[int]) -> int:
    """Return the most bytes that a rank holds at any time.

    `kept` are those that one micro-batch's forward pass of each of its stages keeps; `loss`, those of them which are
    the loss's own and so are needed no more once the gradient of the inputs is there.
    """
    splits = any(what == WEIGHTS for what, _ in order)
    now = most = 0
    for what, stage in order:
        if what == FORWARD:
            now += kept[stage]
        elif what == BACKWARD:
            now -= loss[stage] if splits else kept[stage]
        else:
            now -= kept[stage] - loss[stage]
        most = max(most, now)
    return most


def most_messages(schedule: str, order: Sequence[Action], own: Sequence[int], total: int, micro_batches: int) -> int:
    """Return how many micro-batches' features lie in messages at most, on a rank that has the stages `own` of `total`.

    As PyTorch 2.15 waits for what it sends. GPipe: for outputs when all forward passes are over, for gradients when all
    backward passes are; a rank in the middle has one more on its way. 1F1B: with each neighbour one goes while one
    comes. The others: an output goes with its backward pass, gradients stay to the end of the step, and two messages
    are about to arrive (measured, up to three more). What is received is kept by autograd and counts there, until the
    backward pass; the last stage's inputs stay to the end, for the losses hold on to them.
    """
    is_first, is_last = 0 in own, total - 1 in own
    if schedule == "ScheduleGPipe":
        return 2 * micro_batches if is_last else micro_batches + (not is_first)
    if schedule == "Schedule1F1B":
        return micro_batches + 1 if is_last else 2 if is_first else 4
    splits = any(what == WEIGHTS for what, _ in order)
    now = most = 0
    for what, stage in order:
        first, last = own[stage] == 0, own[stage] == total - 1
        if what == FORWARD:
            now += not last
        elif what == BACKWARD:
            now += (not first) - (not last)
            now += not last if splits else last  # the gradients that came wait for "weights"; else those inputs
        else:
            now -= not last
        most = max(most, now)
    return most + 2
