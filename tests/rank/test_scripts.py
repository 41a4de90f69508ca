"""A script runs unchanged: `__main__`, its command line, its folder, relative imports; `labkit.log` from anywhere."""

from __future__ import annotations

import contextlib
import sys
import textwrap
from multiprocessing.reduction import ForkingPickler

import pytest
import torch

import labkit
from labkit.rank import failure, scripts
from labkit.rank.current import OutsideWorker
from labkit.rank.scripts import Script
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
    (project / "relative.py").write_text("from .helper import NAME\nprint('relative', NAME)\n")
    (project / "__main__.py").write_text(
        "import sys\nfrom . import helper\nprint(__package__, helper.NAME, sys.argv[1:])\n"
    )
    return project


@pytest.fixture
def run(folder, monkeypatch, capsys):
    """Run a script as a rank does, in this process; return what it prints."""
    monkeypatch.setattr(sys, "argv", ["pytest"])
    monkeypatch.setattr(ForkingPickler, "reducer_override", None, raising=False)

    def run(*script):
        scripts.run(Script(*script))
        return capsys.readouterr().out

    return run


@pytest.mark.spawns
def test_a_script_on_one_rank_finds_its_command_line_folder_and_main(folder):
    run = labkit.run_script("project/train.py", "--lr", 0.25, world_size=1)
    assert (folder.parent / "told-0.json").exists()
    assert run.name == "train.py"
    assert list(run.history["loss"]) == [0.25, 0.5, 0.75]


def test_a_script_that_was_edited_runs_as_it_is_now_and_so_do_its_modules(folder, run):
    (folder / "says.py").write_text("import helper\nprint('helper', helper.NAME)\n")
    for name in ("first", "other one"):
        (folder / "helper.py").write_text(f"NAME = {name!r}\n")
        assert run("project/says.py") == f"helper {name}\n"


def test_a_module_runs_as_python_m_runs_it(run):
    assert run("project.relative", (), True) == "relative first\n"
    assert run("project", ("--epochs", "3"), True) == "project first ['--epochs', '3']\n"


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


def test_a_script_that_fails_is_reported_by_its_own_line(folder, run, monkeypatch):
    monkeypatch.setattr(failure, "OWN_FILES", {*failure.OWN_FILES, __file__})  # this calls it as a rank's main does
    (folder / "fails.py").write_text("def inner():\n    raise ValueError('no data')\n\ninner()\n")
    with pytest.raises(ValueError, match="no data") as failed:
        run("project/fails.py")
    _, said, _ = failure.describe(failed.value, {})
    assert "fails.py" in said
    assert scripts.__file__ not in said


def test_outside_labkit_a_script_knows_its_rank_and_what_it_logs_goes_nowhere(monkeypatch):
    for name, value in {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    worker = OutsideWorker()
    assert (worker.rank, worker.local_rank, worker.world_size, worker.stopping) == (3, 1, 4, False)
    worker.expect(3)
    worker.log(loss=1.0)
    labkit.log(loss=1.0)


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


def _own_words(worker, wait, stall_s, live="no"):
    return wait, stall_s, live


@pytest.mark.spawns
def test_a_function_whose_parameters_are_called_as_launchs_gets_them_by_kwargs():
    with pytest.raises(ValueError, match=r"parameter called 'stall_s', but launch\(\) keeps .*kwargs=\{'stall_s'"):
        labkit.launch(_own_words, 1, stall_s=3, world_size=1)
    run = labkit.launch(_own_words, args=(5,), kwargs={"stall_s": 6, "live": 7}, world_size=1)
    assert run.results == [(5, 6, 7)]
