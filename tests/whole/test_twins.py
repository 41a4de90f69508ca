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
