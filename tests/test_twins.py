"""What runs as a script runs in a cell: the same source each way, and the same comes of it."""

from __future__ import annotations

import pytest

from tests.idioms import IDIOMS
from tests.twins import SCRIPTS, Outcome, Twin, outcome
from tests.whole_programs import PROGRAMS

TWINS = [
    Twin(
        "sends objects of its own class to all ranks",
        """
from dataclasses import dataclass

import torch.distributed as dist


@dataclass
class Part:
    rank: int


def main(worker):
    parts = [None] * worker.world_size
    dist.all_gather_object(parts, Part(worker.rank))
    print("rank", worker.rank, "has", len(parts), "parts")
    return [part.rank for part in parts if isinstance(part, Part)]
""",
    ),
    Twin(
        "saves a model with its class, which the notebook loads",
        """
import torch
import torch.distributed as dist
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)


def main(worker):
    if worker.rank == 0:
        torch.save(Net(), "net.pt")
    dist.barrier()
    return isinstance(torch.load("net.pt", weights_only=False), Net)
""",
        scripts=("torchrun",),  # a rank of mp.spawn saves it as __mp_main__.Net
        after="""print(isinstance(torch.load("net.pt", weights_only=False), Net))""",
    ),
    Twin(
        "keeps its weights in one flat buffer",
        """
import torch

flat = torch.zeros(4)
weights = [flat[:2], flat[2:]]


def main(worker):
    flat.add_(4)
    return [weight.tolist() for weight in weights]
""",
    ),
]


@pytest.fixture(scope="module")
def as_a_script(tmp_path_factory):
    """What comes of a twin as a script, run once for all the other ways."""
    known: dict[str, Outcome] = {}

    def run(twin: Twin) -> Outcome:
        if twin.name not in known:
            known[twin.name] = outcome(twin, twin.scripts[0], tmp_path_factory.mktemp("twin") / "script")
        return known[twin.name]

    return run


WAYS = [pytest.param(twin, way, id=f"{way}: {twin.name}") for twin in [*TWINS, *IDIOMS, *PROGRAMS] for way in twin.ways]


@pytest.mark.spawns
@pytest.mark.parametrize(("twin", "way"), WAYS)
def test_a_cell_does_what_a_script_does(twin, way, as_a_script, tmp_path):
    script = as_a_script(twin)
    got = outcome(twin, way, tmp_path / way)
    if twin.refused and way not in SCRIPTS:
        assert got.status == "refused"
        assert twin.refused in got.said
        return
    has_parent = "torchrun" not in (way, twin.scripts[0])
    assert got.compared(has_parent) == script.compared(has_parent), got.said
