"""Six models that are in no lesson through every strategy: right, or refused by name before anything is trained."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch

import labkit
from course import benchmark
from course.strategies import ALL
from tests.conftest import shared_session
from tests.lessons.six_models import SIX, loss
from tests.support.tiers import few
from tests.support.weights import whole_weights

STEPS, BATCH = 5, 8


def made(name):
    torch.manual_seed(0)
    return SIX[name][0]().double()


def stream(name, device):
    generator = torch.random.manual_seed(1)
    for _ in itertools.count():
        inputs, targets = SIX[name][1](BATCH)
        yield (inputs.double() if inputs.is_floating_point() else inputs).to(device), targets.to(device)
    assert generator


@functools.cache
def trained(name, title):
    """Return a run's results, or why it was refused."""
    strategy = ALL[title]
    ranks = strategy.ranks(2)
    optimizer = functools.partial(torch.optim.SGD, lr=0.05)
    call = benchmark.run_strategy, strategy, functools.partial(made, name), loss, optimizer
    try:
        with shared_session(ranks) as session:
            run = labkit.launch(
                *call, functools.partial(stream, name), STEPS, on=session, world_size=ranks, seed=0, live=False
            )
    except labkit.WorkerFailed as error:
        assert labkit.runs[-1].recorded.names == [], "nothing was trained"
        return str(error)
    return run.results


@pytest.mark.spawns
@pytest.mark.parametrize(
    ("name", "title"),
    few(
        itertools.product(SIX, ALL),
        lambda case: case in {("tied language model", "GPipe"), ("transformer", "FSDP2"), ("recommender", "DDP")},
    ),
)
def test_a_model_is_trained_rightly_or_refused_by_name(name, title):
    found = trained(name, title)
    if isinstance(found, str):
        assert f"{title} cannot " in found, found
        return
    if ALL[title].exact:
        off = benchmark.difference(whole_weights(trained(name, "one process")), whole_weights(found))
        assert off < 1e-9, f"{title} computes another step of the {name}: {off:.0e}"


@pytest.mark.spawns
def test_a_strategy_that_refuses_a_network_keeps_its_row_and_costs_the_others_nothing():
    with shared_session(2) as session:
        compared = benchmark.every_strategy(
            [ALL[title] for title in ("one process", "GPipe", "DDP")],
            functools.partial(made, "U-Net"),
            loss,
            functools.partial(torch.optim.SGD, lr=0.05),
            functools.partial(stream, "U-Net"),
            steps=STEPS,
            on=session,
            live=False,
        )
    table = compared.frame()
    assert table["status"].tolist() == ["finished", "failed", "finished"]
    assert "GPipe cannot cut this network: its layers were called" in table.loc["GPipe", "error"]
    assert table.loc["DDP", "difference"] < 1e-9
    assert "nan" not in compared.lanes().layout.xaxis.title.text
    assert table["device step ms"].notna().tolist() == [True, False, True]
