"""Programs that nobody here wrote, straight from installed packages, with nothing of theirs changed.

| program | on two to four ranks without a GPU |
|---|---|
| `accelerate.test_utils.scripts`: `test_sync`, `test_script` | to the end, as `python -m` runs them |
| the same: `test_distributed_data_loop` | stands still as under torchrun: no GPUs, no `join_uneven_inputs` |
| the same: `test_cli`, `test_ops` | to the end, but without a GPU Accelerate itself has every rank alone in them |
| the same: `test_ddp_comm_hook`, `test_merge_weights` | not tried here: they give DDP `device_ids`, or want GPUs |
| the same: `external_deps` | not tried: they want `evaluate` and `datasets`, and download models |
| `lightning.pytorch.demos`: boring classes, transformer, LSTM | trained by Lightning's Trainer; text as they cache it |
| the same: MNIST | not tried: it downloads its data |
| PyTorch's wheel: its own tests of collectives and DDP | pass, each on ranks that have a process group |
| the same: the parameter server, by `torch.distributed.rpc` | to its end |

The wheel's tests import `expecttest`, which it does not bring: they need a class of it, for which unittest's stands in.
"""

from __future__ import annotations

import os
import tempfile

import pytest

import labkit
from tests.conftest import LONG_S, shared_session, wait_until

ACCELERATES = "accelerate.test_utils.scripts."
SCRIPTS = {
    "test_sync": "Test `accumulate` gradient accumulation with optimizer and scheduler",
    "test_script": "**Test reinstantiated state**",
}
"""Those that Accelerate tests itself with, and what each says towards its end."""

PYTORCHS = (
    *("send_recv", "send_recv_any_source", "send_recv_with_tag", "isend", "irecv", "batch_isend_irecv_gloo"),
    *("broadcast", "broadcast_group", "reduce_sum", "reduce_group_max", "all_reduce_sum", "all_reduce_sum_async"),
    *("all_reduce_group_min", "all_reduce_full_group_product", "all_reduce_sum_complex", "scatter", "scatter_group"),
    *("gather", "gather_full_group", "all_gather", "all_gather_complex", "all_gather_group"),
    *("all_to_all", "all_to_all_single_unequal_split", "all_to_all_group", "barrier_group"),
    *("all_gather_object_default_pg", "all_gather_object_subgroup", "gather_object", "broadcast_object_list"),
    *("scatter_object_list", "get_rank_size_group", "new_subgroups_by_enumeration_negative_input_rank"),
    *("DistributedDataParallelCPU", "DistributedDataParallelCPU_grad_is_view", "static_graph_api_cpu"),
)
"""Tests of `torch.testing._internal.distributed.distributed_test`."""


@pytest.fixture(scope="module")
def ranks():
    with shared_session(4) as ranks:
        yield ranks


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


def lightnings(module, model_name, **model_options):
    def train(worker, folder):
        import importlib
        import os

        from lightning.pytorch import Trainer
        from lightning.pytorch.demos.boring_classes import BoringDataModule

        os.chdir(folder)
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
        model = getattr(importlib.import_module(f"lightning.pytorch.demos.{module}"), model_name)(**model_options)
        trainer.fit(model, datamodule=BoringDataModule() if module == "boring_classes" else None)
        return trainer.global_step

    return train


def pytorchs_own(names):
    def program(worker, folder):
        import os
        import sys
        import types
        import unittest

        sys.modules.setdefault("expecttest", types.SimpleNamespace(TestCase=unittest.TestCase, ACCEPT=False))
        os.environ.update(BACKEND="gloo", TEMP_DIR=folder)
        from torch.testing._internal.common_utils import TestCase
        from torch.testing._internal.distributed import distributed_test

        class OnThisRank(distributed_test.DistributedTest._DistTestBase, TestCase):
            rank, world_size = worker.rank, worker.world_size

        found = {}
        for name in names:
            result = unittest.TestResult()
            OnThisRank(f"test_{name}").run(result)
            worker.log(tests=len(found))
            found[name] = [text for _, text in result.errors + result.failures + result.skipped]
        return found

    return program


def parameter_server():
    def program(worker):
        import sys
        import types
        import unittest

        sys.modules.setdefault("expecttest", types.SimpleNamespace(TestCase=unittest.TestCase, ACCEPT=False))
        from torch.distributed import rpc
        from torch.testing._internal.distributed.rpc.examples import parameter_server_test

        names = [f"worker{rank}" for rank in range(worker.world_size)]
        rpc.init_rpc(names[worker.rank], rank=worker.rank, world_size=worker.world_size)
        if worker.rank == 0:
            parameter_server_test.run_ps(names[1:])
        rpc.shutdown()

    return program


@pytest.mark.spawns
@pytest.mark.parametrize("script", ["test_sync", pytest.param("test_script", marks=pytest.mark.long)])
def test_accelerates_own_scripts_run_to_their_end(script):
    pytest.importorskip("accelerate")
    # On ranks of their own: Accelerate keeps for a process's life how the first program was launched.
    run = labkit.launch(module_as_program(ACCELERATES + script), world_size=2, live=False)
    assert run.results == [2, 2]
    assert SCRIPTS[script] in run.output[0]


@pytest.mark.spawns
def test_the_script_that_stands_still_under_torchrun_too_is_told_where():
    """Its `join_uneven_inputs` "will have no effect" on CPUs, as it warns: rank 0 has a batch more than rank 1."""
    pytest.importorskip("accelerate")
    program = module_as_program(f"{ACCELERATES}test_distributed_data_loop")
    run = labkit.launch(program, world_size=2, live=False, wait=False)
    wait_until(lambda: run.over.is_set() or "Test joining uneven inputs" in run.output[0], LONG_S)
    wait_until(lambda: run.over.is_set() or "barrier" in run.stacks().missed, LONG_S)
    assert "rank 0 is in broadcast" in run.stacks().missed
    assert "rank 1 is in barrier" in run.stacks().missed
    assert "in test_can_join_uneven_inputs" in str(run.stacks())
    run.stop(0)


@pytest.mark.spawns
@pytest.mark.parametrize("model", ["BoringModel", "ManualOptimBoringModel", "DemoModel"])
def test_lightnings_demos_train(ranks, model):
    pytest.importorskip("lightning")
    with tempfile.TemporaryDirectory() as folder:
        run = labkit.launch(lightnings("boring_classes", model), folder, on=ranks, world_size=2, live=False)
    assert run.results == [4, 4]


@pytest.mark.spawns
@pytest.mark.parametrize(("module", "model"), [("transformer", "LightningTransformer"), ("lstm", "LightningLSTM")])
def test_lightnings_language_models_train(ranks, tmp_path, module, model):
    pytest.importorskip("lightning")
    (tmp_path / "data").mkdir()
    text = "\n".join(" ".join(f"word{(i * j) % 50}" for j in range(20)) for i in range(400))
    (tmp_path / "data" / "wikitext-2.txt").write_text(text)  # where they keep what they have downloaded
    run = labkit.launch(lightnings(module, model, vocab_size=52), tmp_path, on=ranks, world_size=2, live=False)
    assert run.results == [4, 4]


@pytest.mark.spawns
def test_pytorchs_own_tests_of_collectives_pass(ranks, tmp_path):
    for folder in ("barrier", "test_dir", "init_dir"):  # as its harness makes them
        os.mkdir(tmp_path / folder)
    run = labkit.launch(pytorchs_own(PYTORCHS), str(tmp_path), on=ranks, live=False, backend="gloo")
    for rank, found in enumerate(run.results):
        assert {name: said for name, said in found.items() if said} == {}, f"rank {rank}"


@pytest.mark.spawns
def test_pytorchs_parameter_server_is_served(ranks):
    run = labkit.launch(parameter_server(), on=ranks, world_size=3, live=False, backend="gloo")
    assert "Finish training" in run.output[0]
    assert "worker2 got updated model" in run.output[2]
