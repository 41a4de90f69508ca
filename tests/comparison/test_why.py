"""Why two ways to train differ: only what was taken away, and made them equal, is called the reason."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import labkit
from labkit.comparison import why
from labkit.comparison.why import BATCH_NORM, DROPOUT, SHORT, find, fingerprints, suspects, without
from tests.conftest import shared_session


def tried(equal_without):
    """Weights that are equal once all of these are taken away."""
    return lambda changes: (0.0, "equal") if set(equal_without) <= set(changes) else (0.1, "off by 1e-01 (0.weight)")


def test_what_makes_the_weights_equal_is_the_reason():
    found = find(frozenset((DROPOUT, BATCH_NORM, SHORT)), tried([BATCH_NORM]), True)
    assert found.reason.startswith("BatchNorm: ")
    tries = ["in 64 bits", "without dropout", "with BatchNorm's statistics fixed"]
    assert [trial.changed for trial in found.trials] == tries


def test_rounding_that_batch_norm_enlarges_is_called_rounding():
    """Without either the weights are equal: 64 bits take all of it away, fixed statistics only what enlarges it."""

    def either(changes):
        return (0.0, "equal") if {SHORT, BATCH_NORM} & set(changes) else (0.1, "off by 1e-01 (0.weight)")

    found = find(frozenset((BATCH_NORM, SHORT)), either, True)
    assert found.reason == why.CHANGES[SHORT][1]


def test_two_reasons_together_are_found():
    found = find(frozenset((DROPOUT, BATCH_NORM)), tried([DROPOUT, BATCH_NORM]), True)
    assert "dropout: " in found.reason
    assert "BatchNorm: " in found.reason


def test_no_reason_is_claimed_that_was_not_found():
    found = find(frozenset((DROPOUT, SHORT)), tried(["something else"]), None)
    assert found.reason == ""
    assert "not among those that were tried" in str(found)
    assert len(found.trials) == 3


def test_other_samples_are_known_without_another_run():
    assert find(frozenset((DROPOUT,)), pytest.fail, False).reason.startswith("other inputs")
    batch = torch.randn(6, 3, 2)
    parts = [fingerprints(part) for part in batch.chunk(2)]
    assert set().union(*parts) == fingerprints(batch) == fingerprints(batch.flatten(1))
    assert len(fingerprints(batch)) == 6
    assert fingerprints(torch.randn(4, 2)) != fingerprints(torch.randn(4, 2))
    assert fingerprints(batch.bfloat16())
    assert fingerprints(torch.tensor(1.0)) == set()


def test_suspects_are_what_a_network_has_and_uses():
    def of(*modules):
        return suspects(modules, [weight for module in modules for weight in module.parameters()])

    assert of(nn.Dropout(0.1)) == {DROPOUT}
    assert of(nn.Dropout(0.0), nn.Dropout(0.5).eval()) == set()
    assert of(nn.BatchNorm1d(2).double()) == {BATCH_NORM}
    assert of(nn.SyncBatchNorm(2).double(), nn.BatchNorm1d(2).double().eval()) == set()
    assert of(nn.Linear(2, 2)) == {SHORT}


def test_suspects_are_taken_away_inside_and_nothing_is_left_behind():
    hooks = dict(torch.nn.modules.module._global_forward_pre_hooks)
    with without((DROPOUT, BATCH_NORM, SHORT)):
        network = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
        inputs = torch.randn(4, 3, dtype=torch.float32)
        outputs = network(inputs)
        assert torch.equal(outputs, network(inputs))
        assert outputs.dtype == torch.float64
        assert network[1].num_batches_tracked == 0
    assert torch.get_default_dtype() == torch.float32
    assert dict(torch.nn.modules.module._global_forward_pre_hooks) == hooks


def train(worker, steps, more=(), wrap=lambda model: model, seed=1):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), *(make() for make in more), nn.Linear(4, 2))
    wrapped = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        inputs = torch.randn(8, 6, generator=generator, dtype=torch.float32).chunk(worker.world_size)[worker.rank]
        optimizer.zero_grad()
        loss = wrapped(inputs).square().mean()
        loss.backward()
        optimizer.step()
        worker.log(loss=loss.item())
    return model.state_dict()


def with_batch_norm(worker, steps):
    return train(worker, steps, [functools.partial(nn.BatchNorm1d, 4)])


def ddp_with_batch_norm(worker, steps):
    return train(worker, steps, [functools.partial(nn.BatchNorm1d, 4)], DistributedDataParallel)


def ddp_of_other_samples(worker, steps):
    return train(worker, steps, [functools.partial(nn.BatchNorm1d, 4)], DistributedDataParallel, seed=2)


@pytest.mark.spawns
def test_batch_norm_is_found_by_running_both_without_it():
    with shared_session(2) as ranks:
        compared = labkit.compare(
            {"one": with_batch_norm, "DDP": ddp_with_batch_norm, "other": ddp_of_other_samples},
            world_size={"one": 1, "DDP": 2, "other": 2},
            on=ranks,
            steps=5,
        )
        assert compared.table().data.loc["DDP", "weights, compared with one"].startswith("off by")
        assert compared.why("DDP").reason == why.CHANGES[BATCH_NORM][1]
        assert compared.why("other").reason.startswith("other inputs")
        with pytest.raises(ValueError, match=r"known are one, DDP \(ddp\), other; got 'mine'"):
            compared.why("mine")
