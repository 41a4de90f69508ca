"""A training function without what makes ranks differ, and nothing of that left behind."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import course


def train(worker, steps=1):
    """Return a network and what it computes twice of the same inputs."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
    inputs = torch.randn(4, 3, dtype=torch.float32)
    return network, network(inputs), network(inputs)


def test_what_is_taken_away_is_away_inside_and_there_again_afterwards():
    hooks = dict(torch.nn.modules.module._global_forward_pre_hooks)
    network, one, two = course.without(train, "dropout", "BatchNorm", "low precision")(None, steps=2)
    assert torch.equal(one, two)
    assert one.dtype == torch.float64
    assert network[1].num_batches_tracked == 0
    assert torch.get_default_dtype() == torch.float32
    assert dict(torch.nn.modules.module._global_forward_pre_hooks) == hooks


def test_the_rest_stays():
    network, one, two = course.without(train, "BatchNorm")(None)
    assert not torch.equal(one, two), "dropout"
    assert (one.dtype, network[1].num_batches_tracked.item()) == (torch.float32, 0)
    network, *_ = course.without(train, "dropout")(None)
    assert network[1].num_batches_tracked == 2


def test_a_function_that_fails_leaves_nothing_behind():
    hooks = dict(torch.nn.modules.module._global_forward_pre_hooks)
    with pytest.raises(ZeroDivisionError):
        course.without(lambda worker: 1 / 0, "low precision")(None)
    assert torch.get_default_dtype() == torch.float32
    assert dict(torch.nn.modules.module._global_forward_pre_hooks) == hooks


def test_anything_else_is_refused():
    with pytest.raises(ValueError, match="known are dropout, BatchNorm, low precision; got batchnorm"):
        course.without(train, "batchnorm")
