"""A script runs unchanged: `__main__`, its command line, its folder, relative imports; `labkit.log` from anywhere."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import textwrap

import pytest
import torch

import labkit
from labkit.rank.current import OutsideWorker
from labkit.rank.worker import takes_worker

SCRIPT = """
    import argparse, json, os, pickle, sys
    import torch, torch.distributed as dist
    import labkit
    import helper

    class Point:
        def __init__(self, x):
            self.x = x

    def main():
        parser = argparse.ArgumentParser()
        parser.add_argument("--lr", type=float, default=0.5)
        args = parser.parse_args()
        dist.init_process_group("gloo")
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, Point(dist.get_rank()))
        for step in range(3):
            labkit.log(loss=args.lr * (step + 1))
        told = {
            "name": __name__, "file": os.path.basename(__file__), "argv": sys.argv[1:], "lr": args.lr,
            "points": [p.x for p in everyone], "helper": helper.NAME, "first": os.path.basename(sys.path[0]),
            "is_main": sys.modules["__main__"].Point is Point, "round": pickle.loads(pickle.dumps(Point(7))).x,
            "cwd": os.path.basename(os.getcwd()), "world": labkit.current().world_size,
        }
        with open(f"told-{labkit.current().rank}.json", "w") as file:
            json.dump(told, file)
        dist.destroy_process_group()

    if __name__ == "__main__":
        main()
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A project with a script and its module in one folder, and a working folder beside it."""
    monkeypatch.chdir(tmp_path)
    project = tmp_path / "project"
    project.mkdir()
    (project / "train.py").write_text(textwrap.dedent(SCRIPT))
    (project / "helper.py").write_text("NAME = 'first'\n")
    (project / "__init__.py").touch()
    (project / "relative.py").write_text("from .helper import NAME\nimport labkit\nlabkit.log(letters=len(NAME))\n")
    (project / "__main__.py").write_text(
        "import sys\nfrom . import helper\nprint(__package__, helper.NAME, sys.argv[1:])\n"
    )
    return project


@pytest.mark.spawns
def test_a_script_on_one_rank_finds_its_command_line_folder_and_main(folder):
    run = labkit.run_script("project/train.py", "--lr", 0.25, world_size=1)
    assert (folder.parent / "told-0.json").exists()
    assert run.name == "train.py"
    assert list(run.history["loss"]) == [0.25, 0.5, 0.75]


@pytest.mark.spawns
def test_a_script_that_was_edited_runs_as_it_is_now_and_so_do_its_modules(folder):
    (folder / "says.py").write_text("import helper\nprint('helper', helper.NAME)\n")
    said = []
    for name in ("first", "other one"):
        (folder / "helper.py").write_text(f"NAME = {name!r}\n")
        said.append(labkit.run_script(folder / "says.py", world_size=1).output[0])
    assert said == ["helper first\n", "helper other one\n"]


@pytest.mark.spawns
def test_a_module_runs_as_python_m_runs_it(folder):
    run = labkit.run_module("project.relative", world_size=1)
    assert list(run.history["letters"]) == [5]
    run = labkit.run_module("project", "--epochs", 3, world_size=1)
    assert run.output[0] == "project first ['--epochs', '3']\n"


@pytest.mark.parametrize(
    ("start", "says"),
    [
        (lambda: labkit.run_script("trian.py"), "there is no script .*trian.py"),
        (lambda: labkit.run_module("no_such.module"), "there is no module 'no_such'"),
        (lambda: labkit.run_script("project/train.py", lr=0.1), 'lr=… is no option of labkit.launch .* "--lr", 0.1'),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_starts(folder, start, says):
    with pytest.raises((FileNotFoundError, ModuleNotFoundError, TypeError), match=says):
        start()


@pytest.mark.spawns
def test_a_script_that_fails_is_reported_by_its_own_line(folder):
    (folder / "fails.py").write_text("def inner():\n    raise ValueError('no data')\n\ninner()\n")
    with pytest.raises(labkit.WorkerFailed) as failed:
        labkit.run_script("project/fails.py", world_size=1)
    said = str(failed.value)
    assert "no data" in said
    assert "fails.py" in said
    assert "scripts.py" not in said


@pytest.mark.spawns
def test_a_script_that_exits_with_a_code_fails_with_it_and_with_none_or_0_has_finished(folder):
    (folder / "exits.py").write_text("import sys\nsys.exit(int(sys.argv[1]))\n")
    assert labkit.run_script("project/exits.py", 0, world_size=1).error is None
    with pytest.raises(labkit.WorkerFailed, match="3"):
        labkit.run_script("project/exits.py", 3, world_size=1)


@pytest.mark.spawns
def test_outside_labkit_the_script_runs_as_ever_and_knows_its_rank(folder):
    code = """
import labkit
worker = labkit.current()
labkit.log(loss=1.0)
worker.expect(3)
print(worker.rank, worker.local_rank, worker.world_size, worker.device)
"""
    environment = {
        **os.environ,
        "RANK": "3",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "4",
        "CUDA_VISIBLE_DEVICES": "",
    }
    said = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert said.stdout == "3 1 4 cpu\n"
    assert said.stderr == ""


@pytest.mark.parametrize(
    ("gpus", "ranks", "device"),
    [(2, "2", "cuda:1"), (1, None, "cpu"), (4, "8", "cpu")],
)
def test_a_script_under_torchrun_computes_on_the_cpu_where_gpus_do_not_suffice_for_all_its_ranks(
    gpus, ranks, device, monkeypatch
):
    """Rank 0 on the GPU and rank 1 on the CPU would wait for each other in different process groups."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks) if ranks else monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    with pytest.warns(UserWarning, match=f"sees {gpus} of its GPUs") if device == "cpu" else contextlib.nullcontext():
        assert str(OutsideWorker().device) == device


def test_in_a_process_that_a_rank_has_started_it_is_said_once_that_nothing_is_logged(monkeypatch):
    monkeypatch.setenv("LABKIT_RANK_PID", "17")
    with pytest.warns(UserWarning, match="process 17.*does not get it"):
        OutsideWorker().log(loss=1.0)


def _no_worker(lr=0.1):
    labkit.log(lr=lr)
    return labkit.current().world_size


@pytest.mark.parametrize(
    ("function", "args", "kwargs", "takes"),
    [
        (lambda worker: 0, (), {}, True),
        (lambda w, steps=3: 0, (5,), {}, True),
        (lambda worker=None: 0, (), {}, True),
        (lambda *args, **kwargs: 0, (), {}, True),
        (lambda: 0, (), {}, False),
        (lambda args: 0, ("parsed",), {}, False),
        (lambda lr=0.1: 0, (), {"lr": 0.2}, False),
        (lambda *, lr: 0, (), {"lr": 0.2}, False),
    ],
)
def test_a_function_gets_the_worker_if_it_has_a_place_for_it(function, args, kwargs, takes):
    assert takes_worker(function, args, kwargs) is takes


@pytest.mark.spawns
def test_a_function_without_the_worker_logs_and_knows_its_rank():
    run = labkit.launch(_no_worker, lr=0.5, world_size=1)
    assert run.results == [1]
    assert list(run.history["lr"]) == [0.5]


def _own_words(worker, wait, stall_s, live="no"):
    return wait, stall_s, live


@pytest.mark.spawns
def test_a_function_whose_parameters_are_called_as_launchs_gets_them_by_kwargs():
    with pytest.raises(ValueError, match=r"parameter called 'stall_s', but launch\(\) keeps .*kwargs=\{'stall_s'"):
        labkit.launch(_own_words, 1, stall_s=3, world_size=1)
    run = labkit.launch(_own_words, args=(5,), kwargs={"stall_s": 6, "live": 7}, world_size=1)
    assert run.results == [(5, 6, 7)]
