"""What runs as a script runs in a cell: the same source each way, and the same comes of it."""

from __future__ import annotations

import pytest

from tests.support.carried import CARRIED
from tests.support.idioms import IDIOMS
from tests.support.tiers import few
from tests.support.twins import SCRIPTS, UNCHANGED, Outcome, Twin, outcome
from tests.support.whole_programs import PROGRAMS


@pytest.fixture(scope="module")
def as_a_script(tmp_path_factory):
    """What comes of a twin as a script, run once for all the other ways."""
    known: dict[str, Outcome] = {}

    def run(twin: Twin) -> Outcome:
        if twin.name not in known:
            known[twin.name] = outcome(twin, twin.scripts[0], tmp_path_factory.mktemp("twin") / "script")
        return known[twin.name]

    return run


WAYS = [
    pytest.param(twin, way, id=f"{way}: {twin.name}") for twin in [*CARRIED, *IDIOMS, *PROGRAMS] for way in twin.ways
]


ALSO_ELSEWHERE = {
    "sends objects of its own class to all ranks": (),
    "has set up logging": pytest.mark.wide,
    "finds modules by a relative path and changes the folder": pytest.mark.wide,
    "joins with init_process_group() by its environment": pytest.mark.wide,
}
"""Twins that run on every engine, and their markers; `make test-long` runs all."""


def cells_of(is_one):
    """Return the twins that have such a cell, to be run as one of another kind."""
    return [
        pytest.param(twin, id=twin.name, marks=ALSO_ELSEWHERE.get(twin.name, pytest.mark.long))
        for twin in [*CARRIED, *IDIOMS, *PROGRAMS]
        if is_one(twin)
    ]


def agrees(script: Outcome, twin: Twin, got: Outcome, with_after: bool = True) -> None:
    if twin.refused:
        assert got.status == "refused"
        assert twin.refused in got.said
        return
    assert got.compared(with_after) == script.compared(with_after), got.said


@pytest.mark.spawns
@pytest.mark.parametrize(("twin", "way"), few(WAYS, 26))
def test_a_cell_does_what_a_script_does(twin, way, as_a_script, tmp_path):
    script = as_a_script(twin)
    got = outcome(twin, way, tmp_path / way)
    is_script = way in (*SCRIPTS, UNCHANGED)
    has_parent = not {way, twin.scripts[0]} & {"torchrun", UNCHANGED}
    agrees(script, twin._replace(refused="") if is_script else twin, got, has_parent)


@pytest.mark.spawns
@pytest.mark.parametrize("twin", cells_of(lambda twin: "cell" in twin.cells))
def test_a_cell_on_standby_ranks_does_what_a_script_does(twin, as_a_script, tmp_path):
    got = outcome(twin, "standby", tmp_path / "standby")
    agrees(as_a_script(twin), twin, got, "torchrun" not in twin.scripts[0])


@pytest.mark.wide
@pytest.mark.cluster
@pytest.mark.parametrize("twin", cells_of(lambda twin: twin.elsewhere))
def test_a_cell_on_slurm_does_what_a_script_does(twin, as_a_script, slurm, tmp_path):
    got = outcome(twin, "slurm", tmp_path / "slurm")
    agrees(as_a_script(twin), twin, got, "torchrun" not in twin.scripts[0])


# The notebook's environment does not come along to Ray's nodes, which may be other machines.
@pytest.mark.wide
@pytest.mark.spawns
@pytest.mark.parametrize("twin", cells_of(lambda twin: twin.elsewhere and not twin.needs_port))
def test_a_cell_on_ray_does_what_a_script_does(twin, as_a_script, ray_cluster, tmp_path):
    got = outcome(twin, "ray", tmp_path / "ray", ray=ray_cluster.address)
    agrees(as_a_script(twin), twin, got, "torchrun" not in twin.scripts[0])
