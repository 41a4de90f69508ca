"""Code for torchrun, trainers that find their ranks themselves, and trackers, inside a launched function.

Code and trainers run twice in a row on the same reserved ranks: the second time finds what the first has left there.
The recipes of notebooks/guide/recipes.md are taken out of that page.
"""

from __future__ import annotations

import json
import os
import re
import struct
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import labkit
from labkit.monitor.output import RankOutput
from tests.support.repository import ROOT

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


@pytest.mark.spawns
def test_joining_twice_is_an_error_as_everywhere(ranks):
    def join_twice(worker):
        dist.init_process_group()
        dist.init_process_group()

    with pytest.raises(labkit.WorkerFailed, match="twice"):
        labkit.launch(join_twice, on=ranks, live=False)


# Recipes


def recipe(title):
    """Return what the code under a heading of the page defines, as a cell would."""
    page = (ROOT / "notebooks" / "guide" / "recipes.md").read_text(encoding="utf-8")
    (code,) = re.findall(
        rf"^### {title}\n.*?^```python\n(.*?)^```$", page.partition("\n## ")[2], re.DOTALL | re.MULTILINE
    )
    defined = {"__name__": "__main__"}
    exec(compile(code, f"<{title}>", "exec"), defined)
    return defined


def test_every_recipe_of_the_page_is_run():
    page = (ROOT / "notebooks" / "guide" / "recipes.md").read_text(encoding="utf-8")
    assert re.findall(r"^### (.*)", page, re.MULTILINE) == [*TRACKERS, *TRAINERS]
    assert page.count("```python\n") == len(TRACKERS) + len(TRAINERS)


# Trackers


def of_tensorboard():
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (file,) = Path("runs/first").glob("events*")
    events = EventAccumulator(str(file)).Reload()
    return [(event.step, event.value) for event in events.Scalars("loss")]


def of_mlflow():
    import mlflow

    client = mlflow.MlflowClient(os.environ["MLFLOW_TRACKING_URI"])
    (run,) = client.search_runs(["0"])
    assert (run.info.run_name, run.info.status) == ("first", "FINISHED")
    return [(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, "loss")]


def of_wandb():
    (file,) = Path("wandb").glob("offline-run-*/run-*.wandb")
    records = list(records_of(file))
    assert [record.exit.exit_code for record in records if record.HasField("exit")] == [0]
    rows = [{item.key or item.nested_key[0]: item.value_json for item in r.history.item} for r in records]
    return [(int(row["_step"]), float(row["loss"])) for row in rows if row]


def records_of(file):
    """The records of a run that Weights & Biases has kept offline: LevelDB's log format after a header of 7 bytes.

    https://github.com/google/leveldb/blob/main/doc/log_format.md; their own reader is no longer in Python.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    data, place, whole, block = file.read_bytes(), 7, b"", 32768
    while place + 7 <= len(data):
        if block - place % block < 7:
            place += block - place % block
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield Record.FromString(whole)
            whole = b""


STAND_IN = """
import json

calls = []


def init(project):
    calls.append(["init", project])


def log(values, step=None):
    calls.append(["log", values, step])


def finish():
    with open("trackio.json", "w") as file:
        json.dump(calls, file)
"""
"""Trackio's documented calls: it needs an older Pillow than the rest."""


def of_trackio():
    begun, *logged = json.loads(Path("trackio.json").read_text())
    assert begun == ["init", "digits"]
    return [(step, values["loss"]) for _, values, step in logged]


TRACKERS = {
    "TensorBoard": ("tensorboard", of_tensorboard),
    "MLflow": ("mlflow", of_mlflow),
    "Weights & Biases": ("wandb", of_wandb),
    "trackio": ("trackio", of_trackio),
}
"""By the heading of the recipe: the package, and what reads back the steps and losses that were written."""


@pytest.mark.spawns
@pytest.mark.parametrize("title", TRACKERS)
def test_a_tracker_has_what_rank_0_logged(title, tmp_path, monkeypatch):
    package, read = TRACKERS[title]
    monkeypatch.chdir(tmp_path)
    # Files: a database would need two more packages, and a quarter of a minute to be made.
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    Path("trackio.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(tmp_path)
    pytest.importorskip(package)
    run = labkit.launch(recipe(title)["train"], STEPS, world_size=2, live=False)
    assert run.status == "finished"
    losses = [(step, pytest.approx(1 / (step + 1))) for step in range(STEPS)]
    assert read() == losses
    for rank in range(2):
        of_rank = run.history[run.history["rank"] == rank]
        assert list(zip(of_rank["step"], of_rank["loss"], strict=True)) == losses


# Trainers


def with_accelerate(parts):
    def train(worker):
        data = torch.utils.data.TensorDataset(torch.randn(16 * STEPS, 4))
        main(worker, torch.nn.Linear(4, 1), data)
        return accelerate.PartialState().num_processes

    import accelerate

    main = parts["train"]
    return train


def with_fabric(parts):
    def train(worker):
        from lightning.fabric import Fabric

        fabric = Fabric(accelerator="cpu", strategy="ddp", devices=2, loggers=Curves())
        fabric.launch()
        model = torch.nn.Linear(4, 1)
        model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for step in range(STEPS):
            loss = model(torch.randn(8, 4)).pow(2).mean()
            optimizer.zero_grad()
            fabric.backward(loss)
            optimizer.step()
            fabric.log("loss", loss, step=step)
        return fabric.world_size

    Curves = parts["Curves"]
    return train


def with_lightning(parts):
    def train(worker):
        from lightning.pytorch.demos.boring_classes import BoringModel

        class Model(BoringModel):
            def training_step(self, batch, index):
                step = super().training_step(batch, index)
                self.log("loss", step["loss"])
                return step

        model = Model()
        main(worker, model, STEPS)
        return model.trainer.world_size

    main = parts["train"]
    return train


def with_transformers(parts):
    def train(worker):
        from transformers import BertConfig, BertForSequenceClassification

        sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        model = BertForSequenceClassification(BertConfig(vocab_size=50, **sizes))
        data = [{"input_ids": torch.randint(0, 50, (6,)), "labels": torch.tensor(i % 2)} for i in range(32)]
        main(worker, model, data, STEPS)
        return torch.distributed.get_world_size()

    main = parts["train"]
    return train


TRAINERS = ("Accelerate", "Lightning", "Transformers")


@pytest.mark.spawns
@pytest.mark.parametrize(
    ("title", "function", "log"),
    [
        ("Accelerate", with_accelerate, {0}),  # says so itself: "on the main process only"
        ("Lightning", with_fabric, {0, 1}),
        ("Lightning", with_lightning, {0, 1}),
        ("Transformers", with_transformers, {0, 1}),
    ],
    ids=["Accelerate", "Fabric", "Lightning", "Transformers"],
)
def test_a_trainer_runs_twice_in_a_row_and_its_values_are_curves(ranks, title, function, log, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pytest.importorskip(title.lower())
    run = twice(function(recipe(title)), ranks)
    assert run.results == [2] * 2
    assert set(run.history["rank"]) == log
    for _, logged in run.history.groupby("rank"):
        assert len(logged) == STEPS == logged["loss"].notna().sum()


def test_what_older_gloo_says_of_itself_whenever_ranks_meet_is_no_output_of_the_reader():
    output = RankOutput()
    for text in ("[Gloo] Rank 0 is connected to 1 peer ranks. Expected ", "number is : 1\nhello\n", "[Gloo] is mine\n"):
        output.add(text)
    assert output.take_new() == ["hello", "[Gloo] is mine"]
