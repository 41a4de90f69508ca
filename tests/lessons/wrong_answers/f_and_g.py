"""Wrong answers to `f_and_g`, and a piece of what each must be told."""

from typing import Any

import torch
import torch.distributed as dist

from course.exercises.f_and_g import f_and_g
from tests.support.wrong_answers import told


def _function(forward: Any, backward: Any) -> Any:
    """Return an autograd function with these two passes."""
    passes = {"forward": staticmethod(lambda ctx, x: forward(x)), "backward": staticmethod(lambda ctx, x: backward(x))}
    kind: Any = type("Function", (torch.autograd.Function,), passes)
    return kind.apply


def _same(x: Any) -> Any:
    return x.view_as(x)


def _sum(x: Any) -> Any:
    total = x.clone()
    dist.all_reduce(total)
    return total


@told("who adds up backward?")
def forgets_f():
    """Only the forward sum."""
    return _function(_same, _same), _function(_sum, _same)


@told("g's gradient was added up")
def sums_both_ways():
    """As `torch.distributed.nn.functional.all_reduce` does."""
    return _function(_same, _same), _function(_sum, _sum)


@told("this rank's hidden units only: who adds up?")
def forgets_g():
    """Only the backward sum."""
    return _function(_same, _sum), _function(_same, _same)


@told("f all-reduces forward")
def the_wrong_way_round():
    """g before, f after."""
    return _function(_sum, _same), _function(_same, _sum)


@told("returned no pair of functions, (f, g)")
def only_one():
    """One of two."""
    return f_and_g()[0]
