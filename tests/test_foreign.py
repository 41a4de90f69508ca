"""Programs that nobody here wrote, straight from installed packages, with nothing of theirs changed.

Each is run as `python -m` runs it, on every rank. PyTorch's own wheel carries no distributed example that runs without
its test harness or a download; Lightning's demos but these want a download, too.
"""

from __future__ import annotations

import tempfile

import pytest

import labkit
from tests.conftest import shared_session

SCRIPTS = {
    "test_cli": "Successfully ran on 0 GPUs",
    "test_ops": "testing op_checker",
    "test_sync": "Test `accumulate` gradient accumulation with optimizer and scheduler",
    "test_ddp_comm_hook": "Test DDP comm hook: batched_power_sgd, comm wrapper: bf16",
    "test_distributed_data_loop": "Test DataLoader with sampler as an instance of `BatchSampler`",
}
"""Those of `accelerate.test_utils.scripts`, which Accelerate tests itself with, and what each says towards its end."""


@pytest.fixture(scope="module")
def ranks():
    with shared_session(2) as ranks:
        yield ranks


# Functions are made in functions: so they travel by value, as from a cell.


def module_as_program(name):
    def program(worker):
        import os
        import runpy

        os.environ["ACCELERATE_USE_CPU"] = "true"  # as `accelerate launch --cpu` says it
        runpy.run_module(name, run_name="__main__")

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
@pytest.mark.parametrize("script", SCRIPTS)
def test_accelerates_own_scripts_run_to_their_end(ranks, script):
    pytest.importorskip("accelerate")
    run = labkit.launch(module_as_program(f"accelerate.test_utils.scripts.{script}"), on=ranks, live=False)
    assert run.status == "finished"
    assert SCRIPTS[script] in run.output[0]


@pytest.mark.spawns
@pytest.mark.parametrize("model", ["BoringModel", "ManualOptimBoringModel", "DemoModel"])
def test_lightnings_demos_train(ranks, model):
    pytest.importorskip("lightning")
    with tempfile.TemporaryDirectory() as folder:
        run = labkit.launch(boring(model), folder, on=ranks, live=False)
    assert run.results == [4, 4]
