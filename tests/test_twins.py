"""What runs as a script runs in a cell: the same source each way, and the same comes of it."""

from __future__ import annotations

import pytest

from tests.carried import CARRIED
from tests.idioms import IDIOMS
from tests.twins import SCRIPTS, Outcome, Twin, outcome
from tests.whole_programs import PROGRAMS


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
