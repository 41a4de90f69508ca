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
| public repositories, if LABKIT_PROGRAMS is a folder with copies of them | `tests.benchmarks.foreign_unchanged` |
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

import labkit
from tests.benchmarks import foreign_unchanged
from tests.conftest import LONG_S, wait_until

ACCELERATES = "accelerate.test_utils.scripts."
SCRIPTS = {
    "test_sync": ("**Test Distributed `no_sync` context manager**", "accumulation with optimizer and scheduler"),
    "test_script": ("Num processes: 2", "**Test reinstantiated state**"),
}
"""Those that Accelerate tests itself with, what each says of two ranks that work together, and towards its end."""


# Functions are made in functions: so they travel by value, as from a cell.


def module_as_program(name):
    def program(worker):
        import os
        import runpy

        os.environ["ACCELERATE_USE_CPU"] = "true"  # as `accelerate launch --cpu` says it
        runpy.run_module(name, run_name="__main__")
        from accelerate import PartialState

        return PartialState().num_processes

    return program


def boring(model_name):
    def train(worker, folder):
        from lightning.pytorch import Trainer
        from lightning.pytorch.demos import boring_classes

        trainer = Trainer(
            accelerator="cpu",
            strategy="ddp",
            devices=2,
            max_epochs=1,
            limit_train_batches=4,
            limit_val_batches=1,
            enable_progress_bar=False,
            default_root_dir=folder,
        )
        trainer.fit(getattr(boring_classes, model_name)(), datamodule=boring_classes.BoringDataModule())
        return trainer.global_step

    return train


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


@pytest.mark.spawns
def test_the_script_that_stands_still_under_torchrun_too_is_told_where():
    """Its `join_uneven_inputs` "will have no effect" on CPUs, as it warns: rank 0 has a batch more than rank 1."""
    pytest.importorskip("accelerate")
    program = module_as_program(f"{ACCELERATES}test_distributed_data_loop")
    for _ in range(5):  # now and then gloo finds that a broadcast and a barrier do not fit, and it fails
        run = labkit.launch(program, world_size=2, live=False, wait=False)
        wait_until(lambda run=run: run.over.is_set() or "Test joining uneven inputs" in run.output[0], LONG_S)
        wait_until(lambda run=run: run.over.is_set() or "barrier" in run.stacks().missed, LONG_S)
        if not run.over.is_set():
            break
    assert not run.over.is_set(), str(run.error)
    assert "rank 0 is in broadcast" in run.stacks().missed
    assert "rank 1 is in barrier" in run.stacks().missed
    assert "in test_can_join_uneven_inputs" in str(run.stacks())
    run.stop(0)


@pytest.mark.spawns
@pytest.mark.parametrize("model", ["BoringModel", "ManualOptimBoringModel", "DemoModel"])
def test_lightnings_demos_train(ranks, model):
    pytest.importorskip("lightning")
    with tempfile.TemporaryDirectory() as folder:
        run = labkit.launch(boring(model), folder, on=ranks, live=False)
    assert run.results == [4, 4]


FOLDER = Path(os.environ.get("LABKIT_PROGRAMS", os.devnull))
THERE = [each for each in foreign_unchanged.PROGRAMS if not each.folder or (FOLDER / each.folder).is_dir()]


@pytest.mark.wide
@pytest.mark.spawns
@pytest.mark.timeout(2 * foreign_unchanged.LONG_S)
@pytest.mark.parametrize("program", THERE, ids=[each.title for each in THERE])
def test_a_script_prints_by_labkit_what_it_prints_by_its_own_launcher(program, tmp_path):
    by_its_launcher, by_labkit = foreign_unchanged.tried(program, FOLDER, tmp_path)
    if program.folder and by_its_launcher != "runs":
        pytest.skip(by_its_launcher)  # it has nothing to be compared with: a library is missing, say
    assert (by_its_launcher, by_labkit) == ("runs", "runs")
