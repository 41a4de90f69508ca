"""Programs that nobody here wrote, with nothing of theirs changed: from installed packages, and from a folder of them.

| program | on two ranks without a GPU |
|---|---|
| `accelerate.test_utils.scripts`: `test_sync`, `test_script` | to the end, as `python -m` runs them |
| the same: `test_distributed_data_loop` | stands still as under torchrun: no GPUs, no `join_uneven_inputs` |
| the same: `test_ops`, `test_ddp_comm_hook`, `test_merge_weights` | with pretended GPUs, as under torchrun |
| the same: `test_cli` | not tried here: it prints how many GPUs there are |
| the same: `external_deps` | not tried: they want `evaluate` and `datasets`, and download models |
| `lightning.pytorch.demos.boring_classes`: three models and the data | trained by Lightning's Trainer |
| Lightning's other demos | not tried: they download their data |
| PyTorch's wheel | has no distributed example that needs neither its test harness nor a download |
| public repositories, if LABKIT_PROGRAMS is a folder with copies of them | `tests/support/foreign.py` |
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import labkit
from tests.support import foreign

ACCELERATES = "accelerate.test_utils.scripts."
SCRIPTS = {
    "test_sync": ("**Test Distributed `no_sync` context manager**", "accumulation with optimizer and scheduler"),
    "test_script": ("Num processes: 2", "**Test reinstantiated state**"),
}
"""Those that Accelerate tests itself with, what each says of two ranks that work together, and towards its end."""


# Functions are made in functions: so they travel by value, as from a cell.


@pytest.mark.spawns
@pytest.mark.parametrize("script", ["test_sync", pytest.param("test_script", marks=pytest.mark.long)])
def test_accelerates_own_scripts_run_to_their_end(script, monkeypatch):
    pytest.importorskip("accelerate")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")  # as `accelerate launch --cpu` says it
    # On ranks of their own: Accelerate keeps for a process's life how the first program was launched.
    run = labkit.run_module(ACCELERATES + script, world_size=2, live=False)
    assert run.error is None
    for said in SCRIPTS[script]:
        assert said in run.output[0]


PROGRAMS = Path(os.environ.get("LABKIT_PROGRAMS", os.devnull))


@pytest.mark.wide
@pytest.mark.spawns
@pytest.mark.timeout(2 * foreign.LONG_S)
@pytest.mark.parametrize(
    "program", [each for each in foreign.PROGRAMS if not foreign.why_not(each, PROGRAMS)], ids=lambda each: each.title
)
def test_a_script_prints_by_labkit_what_it_prints_by_its_own_launcher(program, tmp_path):
    expected = foreign.printed(program, foreign.as_a_script(program), PROGRAMS, tmp_path / "script")
    assert expected, "it prints something that can be compared"
    assert foreign.printed(program, foreign.by_labkit(program), PROGRAMS, tmp_path / "labkit") == expected
