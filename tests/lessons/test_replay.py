"""A pipeline's step replayed on ideal devices."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from course.exercises import find
from course.replay import passes, step_length

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


def test_stages_that_wait_for_each_other_are_named():
    orders = [[("backward", 0), ("forward", 0)], gpipe(1, 2, 1)]
    with pytest.raises(ValueError, match=r"wait for each other: \{0: \('backward', 0\), 1: \('forward', 0\)\}"):
        step_length(orders, LASTS)


def test_marks_give_the_order_of_passes():
    marks = [SimpleNamespace(what=what) for what in ("forward", "forward", "backward", "forward")]
    assert passes(marks) == [("forward", 0), ("forward", 1), ("backward", 0), ("forward", 2)]
