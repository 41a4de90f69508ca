"""Code that was written for torchrun, and trainers that find their ranks themselves, inside a launched function.

Each runs twice in a row on the same reserved ranks: the second time finds what the first has left in the process.
"""

from __future__ import annotations

import os
import tempfile

import pytest
import torch
import torch.distributed as dist

import labkit
from labkit.monitor.output import RankOutput
from labkit.rank.script_compat import reuse_process_group as hooks
from labkit.trackers.values import send
from tests.conftest import LONG_S

STEPS = 4


def twice(function, ranks):
    """Launch twice in a row; give the last run, having compared what came of both."""
    runs = [labkit.launch(function, on=ranks, live=False) for _ in range(2)]
    assert [run.status for run in runs] == ["finished"] * 2
    assert runs[0].results == runs[1].results
    return runs[1]


# Functions are made here, in functions: so they travel by value, as from a cell, and import on the ranks.


def a_script():
    def main():
        dist.init_process_group("gloo")
        rank = int(os.environ["RANK"])
        assert rank == int(os.environ["LOCAL_RANK"]) == dist.get_rank()
        total = torch.tensor([rank + 1.0])
        dist.all_reduce(total)
        dist.destroy_process_group()
        dist.init_process_group(init_method="env://")  # once more, after the first is gone
        count = torch.ones(1)
        dist.all_reduce(count)
        dist.destroy_process_group()
        return total.item(), count.item()

    return lambda worker: main()


@pytest.mark.spawns
def test_a_script_for_torchrun_runs_unchanged():
    with labkit.Session(2) as ranks:
        assert twice(a_script(), ranks).results == [(3.0, 2.0)] * 2
    run = labkit.launch(a_script(), live=False)
    assert run.results == [(3.0, 2.0)] * 2


def by_rpc(ends):
    def train(worker):
        from torch.distributed import rpc

        other = f"rank{1 - worker.rank}"
        said = []
        for _ in range(2):
            rpc.init_rpc(f"rank{worker.rank}", rank=worker.rank, world_size=worker.world_size)
            said.append(rpc.rpc_sync(other, os.getenv, ("RANK",)))
            dist.barrier()
            if not ends:
                return None
            rpc.shutdown()
        return said, script(worker)

    script = a_script()
    return train


@pytest.mark.spawns
def test_ranks_call_each_other_through_the_store_that_there_is():
    with labkit.Session(2) as ranks:
        called = [(["1", "1"], (3.0, 2.0)), (["0", "0"], (3.0, 2.0))]
        assert twice(by_rpc(ends=True), ranks).results == called
        labkit.launch(by_rpc(ends=False), on=ranks, live=False)
        assert labkit.launch(by_rpc(ends=True), on=ranks, live=False, stall_s=LONG_S).results == called


@pytest.mark.spawns
@pytest.mark.parametrize(
    ("ask", "said"),
    [
        ({"backend": "nccl"}, r"rank \d asks for a process group with nccl, but labkit.launch has made one with gloo"),
        ({"world_size": 5, "rank": 0}, r"rank \d asks for a process group of 5 ranks, but 2 were launched"),
    ],
    ids=["backend", "ranks"],
)
def test_a_script_that_asks_for_another_group_is_told_so(ranks, ask, said):
    with pytest.raises(labkit.WorkerFailed, match=said):
        labkit.launch(lambda worker: dist.init_process_group(**ask), on=ranks, live=False)


@pytest.mark.spawns
def test_joining_twice_is_an_error_as_everywhere(ranks):
    def join_twice(worker):
        dist.init_process_group()
        dist.init_process_group()

    with pytest.raises(labkit.WorkerFailed, match="twice"):
        labkit.launch(join_twice, on=ranks, live=False)


def test_outside_of_a_run_init_process_group_is_torchs_own(monkeypatch):
    asked = []
    monkeypatch.setattr(hooks, "_init_process_group", lambda *args, **options: asked.append((args, options)))
    hooks._init_as_under_torchrun("gloo", world_size=1, rank=0)
    assert asked == [(("gloo",), {"world_size": 1, "rank": 0})]


# Trainers


def with_accelerate():
    def train(worker):
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True, log_with=labkit.trackers.AccelerateTracker(worker))
        accelerator.init_trackers("run")
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = torch.utils.data.TensorDataset(torch.randn(16 * STEPS, 4))
        model, optimizer, loader = accelerator.prepare(
            model, optimizer, torch.utils.data.DataLoader(data, batch_size=8)
        )
        for step, (x,) in enumerate(loader):
            loss = model(x).pow(2).mean()
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            accelerator.log({"loss": loss, "note": "no number"}, step=step)
        accelerator.end_training()
        return accelerator.num_processes, type(model).__name__

    return train


def with_fabric():
    def train(worker):
        from lightning.fabric import Fabric

        logger = labkit.trackers.LightningLogger(worker)
        fabric = Fabric(accelerator="cpu", strategy="ddp", devices=2, loggers=logger)
        fabric.launch()
        model = torch.nn.Linear(4, 1)
        model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for step in range(STEPS):
            loss = model(torch.randn(8, 4)).pow(2).mean()
            optimizer.zero_grad()
            fabric.backward(loss)
            optimizer.step()
            fabric.log("loss", loss, step=step)
        return fabric.world_size, type(model._forward_module).__name__

    return train


def with_lightning():
    def train(worker):
        from lightning.pytorch import Trainer
        from lightning.pytorch.demos.boring_classes import BoringModel

        class Model(BoringModel):
            def training_step(self, batch, index):
                step = super().training_step(batch, index)
                self.log("loss", step["loss"])
                return step

        trainer = Trainer(
            accelerator="cpu",
            strategy="ddp",
            devices=2,
            max_steps=STEPS,
            limit_val_batches=0,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            logger=labkit.trackers.LightningLogger(worker),
            log_every_n_steps=1,
        )
        trainer.fit(Model())
        return trainer.world_size, trainer.strategy.__class__.__name__

    return train


def with_transformers():
    def train(worker):
        from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

        sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        model = BertForSequenceClassification(BertConfig(vocab_size=50, **sizes))
        data = [{"input_ids": torch.randint(0, 50, (6,)), "labels": torch.tensor(i % 2)} for i in range(32)]
        with tempfile.TemporaryDirectory() as folder:
            arguments = TrainingArguments(
                folder, use_cpu=True, max_steps=STEPS, logging_steps=1, report_to=[], save_strategy="no"
            )
            callback = labkit.trackers.TransformersCallback(worker)
            trainer = Trainer(model, arguments, train_dataset=data, callbacks=[callback])
            trainer.train()
        return trainer.args.world_size, type(trainer.model_wrapped).__name__

    return train


@pytest.mark.spawns
@pytest.mark.parametrize(
    ("package", "function", "parallel", "log"),
    [
        ("accelerate", with_accelerate, "DistributedDataParallel", {0}),  # says so itself: "on the main process only"
        ("lightning", with_fabric, "DistributedDataParallel", {0, 1}),
        ("lightning", with_lightning, "DDPStrategy", {0, 1}),
        ("transformers", with_transformers, "DistributedDataParallel", {0, 1}),
    ],
    ids=["Accelerate", "Fabric", "Lightning", "Transformers"],
)
def test_a_trainer_runs_unchanged_twice_in_a_row_and_its_values_are_curves(ranks, package, function, parallel, log):
    pytest.importorskip(package)
    run = twice(function(), ranks)
    assert run.results == [(2, parallel)] * 2
    assert set(run.history["rank"]) == log
    for _, logged in run.history.groupby("rank"):
        assert len(logged) == STEPS == logged["loss"].notna().sum()
    assert "note" not in run.history


def test_only_numbers_become_curves_under_names_that_are_free():
    sent = []

    class FakeWorker:
        rank = 0

        def log(self, step, **values):
            sent.append((step, values))

    with pytest.warns(UserWarning, match="'rank' is a column of run.history already; what was .* is 'logged_rank'"):
        send(FakeWorker(), {"train/loss": torch.tensor(0.5), "rank": 3, "text": "a", "table": [1, 2]}, 7)
    send(FakeWorker(), {"text": "a"}, 8)
    assert sent == [(7, {"train/loss": 0.5, "logged_rank": 3.0})]


def test_what_older_gloo_says_of_itself_whenever_ranks_meet_is_no_output_of_the_reader():
    output = RankOutput()
    for text in ("[Gloo] Rank 0 is connected to 1 peer ranks. Expected ", "number is : 1\nhello\n", "[Gloo] is mine\n"):
        output.add(text)
    assert output.take_new() == ["hello", "[Gloo] is mine"]
