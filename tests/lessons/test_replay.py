"""A pipeline's step replayed on ideal devices."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from types import SimpleNamespace

import pytest
from torch.distributed.pipelining import schedules

from course.exercises import find
from course.replay import length, most_kept, on_clock, passes, step_length

NAMES = {"F": "forward", "B": "backward"}
LASTS = {"forward": 1.0, "backward": 2.0}


def gpipe(stage, stages, micro_batches):
    return [(what, i) for what in ("forward", "backward") for i in range(micro_batches)]


def one_forward_one_backward(stage, stages, micro_batches):
    order = find("one_forward_one_backward").solution(stage, stages, micro_batches)
    return [(NAMES[kind], i) for kind, i in order]


@pytest.mark.parametrize("schedule", [gpipe, one_forward_one_backward])
@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("micro_batches", [1, 2, 8])
def test_both_schedules_take_as_long_as_the_formula_says_with_fewer_micro_batches_than_stages_too(
    schedule, stages, micro_batches
):
    orders = [schedule(stage, stages, micro_batches) for stage in range(stages)]
    assert step_length(orders, LASTS) == 3 * (micro_batches + stages - 1)


def test_an_order_that_wastes_time_takes_longer():
    def alone(stage, stages, micro_batches):  # a micro-batch at a time
        return [(what, i) for i in range(micro_batches) for what in ("forward", "backward")]

    assert step_length([alone(stage, 2, 4) for stage in range(2)], LASTS) == 3 * 2 * 4


def test_a_deadlock_of_stages_says_before_which_pass_each_is_blocked():
    orders = [[("backward", 0), ("forward", 0)], gpipe(1, 2, 1)]
    with pytest.raises(ValueError, match=re.escape("rank 0 is blocked before ('B', 0, 0), rank 1 is blocked before (")):
        step_length(orders, LASTS)


def test_marks_give_the_order_of_passes():
    marks = [SimpleNamespace(what=what) for what in ("forward", "forward", "backward", "forward")]
    assert passes(marks) == [("forward", 0), ("forward", 1), ("backward", 0), ("forward", 2)]


UNITS = {"F": 1, "B": 2, "I": 1, "W": 1}


def zb_h1(rank, ranks, micro_batches):
    return [(what, rank, i) for what, i in find("zero_bubble").solution(rank, ranks, micro_batches)]


@pytest.mark.parametrize(("ranks", "micro_batches"), [(1, 4), (2, 8), (4, 4), (4, 8)])
def test_zb_h1_idles_for_a_third_of_1f1b_and_no_rank_keeps_more_than_1f1bs_first(ranks, micro_batches):
    split = [zb_h1(rank, ranks, micro_batches) for rank in range(ranks)]
    assert length(on_clock(split, UNITS)) == 3 * micro_batches + ranks - 1
    assert [most_kept(order) for order in split] == [ranks] * ranks
    whole = [find("one_forward_one_backward").solution(rank, ranks, micro_batches) for rank in range(ranks)]
    assert [most_kept(order) for order in whole] == [ranks - rank for rank in range(ranks)]


def test_a_pass_ends_before_those_that_need_it_begin():
    timed = on_clock([zb_h1(rank, 3, 6) for rank in range(3)], UNITS)
    ends = {one[:3]: one.end for order in timed for one in order}
    for order in timed:
        assert all(a.end <= b.begin for a, b in itertools.pairwise(order))
        for one in order:
            needs = {"F": ("F", one.stage - 1), "I": ("I", one.stage + 1), "W": ("I", one.stage)}[one.what]
            assert ends.get((*needs, one.micro_batch), 0) <= one.begin


def pytorch_order(name, ranks, micro_batches):
    """Each rank's passes in the order of one of PyTorch's schedules with two stages on a rank."""
    # The order does not depend on what the stages compute, so none has to exist.
    stage = SimpleNamespace(num_stages=ranks * 2, group_size=ranks, group_rank=0, submod=None)
    schedule = getattr(schedules, name)([stage] * 2, micro_batches, loss_fn=lambda *_: None)
    found = []
    for _, order in sorted(schedule.pipeline_order.items()):
        # A forward and a backward pass that overlap each other's messages are one action of two.
        actions = [one for action in order if action for one in (getattr(action, "sub_actions", None) or [action])]
        found.append([(one.computation_type.value, one.stage_index, one.microbatch_index) for one in actions])
    return found


@pytest.mark.parametrize("name", ["ScheduleInterleaved1F1B", "ScheduleZBVZeroBubble", "ScheduleDualPipeV"])
def test_pytorchs_orders_run_every_pass_once_and_do_not_deadlock_and_in_a_v_all_ranks_keep_equally_much(name):
    if not hasattr(schedules, name):
        pytest.skip(f"this PyTorch has no {name}")
    orders = pytorch_order(name, 4, 8)
    passes = Counter(one for order in orders for one in order)
    assert set(passes.values()) == {1}
    for stage in range(8):
        for i in range(8):
            halves = [("I", stage, i) in passes, ("W", stage, i) in passes]
            assert ("F", stage, i) in passes
            assert [("B", stage, i) in passes] * 2 == [not half for half in halves], "whole, or in two halves"
    assert 24 < length(on_clock(orders, {what: units / 2 for what, units in UNITS.items()})) <= 28.5
    assert (len({most_kept(order) for order in orders}) == 1) == (name != "ScheduleInterleaved1F1B")
