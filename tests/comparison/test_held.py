"""What a rank holds, by owner, against a walk over all tensors that Python knows: in this process, a group of one."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import labkit
from course.strategies.data_parallel import ThreadedDataParallel
from labkit.comparison.held import KINDS, held, most_held
from labkit.rank import staying
from tests.support.tiers import few

WIDTH, BATCH_SIZE = 256, 32
WEIGHTS = 4 * 3 * (WIDTH * WIDTH + WIDTH)
"""Bytes."""
INPUTS = 4 * BATCH_SIZE * WIDTH


@pytest.fixture(autouse=True)
def group_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def network():
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())))


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def alone():
    model = network()
    return model, momentum(model.parameters())


def data_parallel():
    model = ThreadedDataParallel(network())
    return model, momentum(model.parameters())


def ddp(**options):
    model = DistributedDataParallel(network(), **options)
    return model, momentum(model.parameters())


def ddp_with_views():
    return ddp(gradient_as_bucket_view=True)


def half_of_a_whole():
    whole = network()
    model = whole[:2]
    model.keeps = [whole]  # as a training function does that builds the whole network and trains a part
    return model, momentum(model.parameters())


def zero_1():
    model = network()
    return model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.01, momentum=0.9)


def fsdp():
    model = network()
    mesh = init_device_mesh("cpu", (1,))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, momentum(model.parameters())


def tensor_parallel():
    model = network()
    parallelize_module(model, init_device_mesh("cpu", (1,)), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return model, momentum(model.parameters())


def in_a_rank(worker, make):
    return most(make)


def most_in_a_rank(make):
    """As `most`, in a process of its own: device meshes refer to their group for ever, and gloo listens as long."""
    return labkit.launch(in_a_rank, make, world_size=1, live=False).results[0]


def most(make):
    """Take steps, and return the most that is held in the third, besides what is there without them."""
    staying.collect_garbage()
    before = held(None)
    found = most_of(*make())
    return {kind: found[kind] - before[kind] for kind in KINDS}


def most_of(model, optimizer):
    """Take steps, and return the most that is held in the third."""
    inputs = torch.randn(BATCH_SIZE, WIDTH)

    def step():
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    for _ in range(2):
        step()
    with most_held(model, optimizer) as found:
        step()
    return found


@pytest.mark.parametrize("make", few([ddp, alone, data_parallel, zero_1, ddp_with_views, half_of_a_whole], 3))
def test_what_is_held_has_an_owner_but_for_two_percent(make):
    found = most(make)
    assert found["other"] - INPUTS <= 0.02 * sum(found.values())


@pytest.mark.spawns
@pytest.mark.parametrize("make", [fsdp, tensor_parallel])
def test_of_what_is_sharded_too(make):
    found = most_in_a_rank(make)
    assert found["other"] - INPUTS <= 0.02 * sum(found.values())
    assert found["parameters"] == found["gradients"] == found["optimizer state"] == WEIGHTS
    # A layer that FSDP has gathered counts apart.
    assert found["gathered"] >= WEIGHTS / 3 if make is fsdp else found["gathered"] == 0


@pytest.mark.parametrize(
    ("make", "expected"),
    few(
        [
            (alone, {}),
            (data_parallel, {"replicas": 2 * 4 * WIDTH * WIDTH}),  # one copy; the first layer's inputs need no gradient
            (ddp, {"buckets": WEIGHTS}),
            (ddp_with_views, {}),
            (half_of_a_whole, {"gradients": WEIGHTS / 3, "optimizer state": WEIGHTS / 3}),
            (zero_1, {}),
        ],
        2,
    ),
)
def test_each_kind_has_its_bytes(make, expected):
    found = most(make)
    three = ("parameters", "gradients", "optimizer state")
    assert {kind: found[kind] for kind in (*three, "buckets", "replicas", "gathered")} == {
        **dict.fromkeys(three, WEIGHTS),
        **dict.fromkeys(("buckets", "replicas", "gathered"), 0),
        **expected,
    }


def test_buckets_are_as_large_as_pytorch_says():
    model, _ = ddp()
    assert sum(map(int, model._get_ddp_logging_data()["bucket_sizes"].split(","))) == WEIGHTS
    del model
    assert most(ddp)["buckets"] == WEIGHTS


def test_a_storage_counts_once():
    def twice():
        model = network()
        model.shares = copy.copy(model[0])  # the same weights, in two modules
        return model[:6], momentum(model[:6].parameters())

    assert most(twice)["parameters"] == WEIGHTS


def test_what_an_earlier_job_has_left_counts_only_if_it_is_trained(monkeypatch):
    monkeypatch.setattr(staying, "_left", [])
    left = ddp()
    most_of(*left)
    staying.give_memory_back()  # as a reserved rank does between two jobs
    expected = {"parameters": WEIGHTS, "gradients": WEIGHTS, "optimizer state": WEIGHTS}
    assert most_of(*left).items() >= {**expected, "buckets": WEIGHTS}.items()
    assert most_of(*alone()).items() >= {**expected, "buckets": 0}.items()


def leave_a_sharded_network(worker):
    torch.nn.left = fsdp()
    most_of(*torch.nn.left)


def most_in_this_job(worker):
    return most_of(*alone())


@pytest.mark.spawns
def test_what_an_earlier_launch_has_left_on_a_reserved_rank_does_not_count():
    with labkit.Session(1) as ranks:
        labkit.launch(leave_a_sharded_network, on=ranks, live=False)
        (found,) = labkit.launch(most_in_this_job, on=ranks, live=False).results
    assert (found["parameters"], found["gradients"], found["gathered"]) == (WEIGHTS, WEIGHTS, 0)
