"""What a run on reserved ranks sees of the one before it, and what it does not."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
import tempfile
import threading

import pytest
import torch
import torch.distributed as dist

import labkit

pytestmark = pytest.mark.spawns


def make_group():
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, group_name="mine")


def remove_working_folder():
    folder = tempfile.mkdtemp()
    os.chdir(folder)
    os.rmdir(folder)


def keep_a_model_that_waits():
    sys.modules["kept"].model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))


def group_is_alive():
    total = torch.ones(1)
    dist.all_reduce(total)
    return total.item()


def set_handler():
    signal.signal(signal.SIGALRM, lambda *_: None)


UNSEEN = {
    # what the first run does, and how the second looks for it
    "process group": (make_group, lambda: (dist.get_world_size(), group_is_alive(), dist.group.WORLD.group_name)),
    "a group that a model keeps": (keep_a_model_that_waits, group_is_alive),
    "seed of torch": (lambda: torch.manual_seed(7), lambda: torch.rand(1).item()),
    "seed of Python": (lambda: random.seed(7), random.random),
    "threads": (lambda: torch.set_num_threads(7), torch.get_num_threads),
    "default type": (lambda: torch.set_default_dtype(torch.float64), lambda: str(torch.zeros(1).dtype)),
    "environment": (
        lambda: os.environ.update(LABKIT_TEST="seen", MASTER_ADDR="elsewhere"),
        lambda: (os.environ.get("LABKIT_TEST"), os.environ["MASTER_ADDR"], os.environ["RANK"]),
    ),
    "working folder": (remove_working_folder, os.getcwd),
    "gradient mode": (lambda: torch.set_grad_enabled(False), torch.is_grad_enabled),
    "module path": (lambda: sys.path.append("/somewhere"), lambda: list(sys.path)),
    "arguments": (lambda: sys.argv.append("--more"), lambda: list(sys.argv)),
    "streams": (lambda: setattr(sys, "stdout", open(os.devnull, "w")), lambda: sys.stdout.name),  # noqa: SIM115
    "start method": (
        lambda: multiprocessing.set_start_method("forkserver", force=True),
        multiprocessing.get_start_method,
    ),
    "processes": (
        lambda: multiprocessing.get_context("fork").Process(target=threading.Event().wait).start(),
        lambda: len(multiprocessing.active_children()),
    ),
}
SEEN = {
    "global variables of modules": (
        lambda: setattr(sys.modules["kept"], "cache", 7),
        lambda: getattr(sys.modules["kept"], "cache", None),
    ),
    "signal handlers": (set_handler, lambda: repr(signal.getsignal(signal.SIGALRM))),
    "modules": (lambda: __import__("wave"), lambda: "wave" in sys.modules),
}


def change(worker, what):
    for name, (act, _) in {**UNSEEN, **SEEN}.items():
        if name in what:
            act()
    worker.log(loss=1.0)
    worker.log(loss=2.0)


def look(worker, what):
    sys.modules.setdefault("kept", type(sys)("kept"))
    worker.log(loss=3.0)
    return {name: see() for name, (_, see) in {**UNSEEN, **SEEN}.items() if name in what}


@pytest.fixture(scope="module")
def runs():
    """The same look at a rank before and after another run has changed all that it could."""
    what = sorted({**UNSEEN, **SEEN})
    with labkit.Session(1) as ranks:
        before = labkit.launch(look, what, on=ranks, live=False)
        labkit.launch(change, what, on=ranks, live=False)
        after = labkit.launch(look, what, on=ranks, live=False)
        pids = ranks.pids
        yield before, after
        assert ranks.pids == pids  # all of it in one process


@pytest.mark.parametrize("what", UNSEEN)
def test_a_run_does_not_see(runs, what):
    before, after = runs
    assert after.results[0][what] == before.results[0][what]


@pytest.mark.parametrize("what", SEEN)
def test_a_run_sees(runs, what):
    before, after = runs
    assert after.results[0][what] != before.results[0][what]


def test_each_run_counts_its_own_steps_and_has_its_own_log(runs):
    for run in runs:
        assert run.history[["step", "loss"]].to_numpy().tolist() == [[0, 3.0]]


def test_a_launch_sees_the_surroundings_of_the_notebook_as_they_are_now(monkeypatch, tmp_path):
    def here(worker):
        return os.environ.get("LABKIT_TEST"), os.getcwd(), os.getcwd() in sys.path

    with labkit.Session(1) as ranks:
        monkeypatch.setenv("LABKIT_TEST", "new")
        monkeypatch.chdir(tmp_path)
        monkeypatch.syspath_prepend("/unused")
        monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
        assert labkit.launch(here, on=ranks, live=False).results == [("new", str(tmp_path), True)]


def test_cells_keep_their_state_from_one_to_the_next_though_a_launch_in_between_sets_its_own():
    def see(worker):
        return str(torch.get_default_dtype()), "CELL" in os.environ, torch.initial_seed()

    with labkit.Session(1) as ranks:
        ranks.run("import os; os.environ['CELL'] = '1'; torch.set_default_dtype(torch.float64); torch.manual_seed(5);")
        first = ranks.values("torch.rand(1).item()")
        assert labkit.launch(see, on=ranks, seed=3, live=False).results == [("torch.float32", False, 3)]
        assert ranks.values("(os.environ['CELL'], str(torch.get_default_dtype()))") == [("1", "torch.float64")]
        again = ranks.values("torch.rand(1).item()")
        ranks.run("torch.manual_seed(5);")
        assert ranks.values("(torch.rand(1).item(), torch.rand(1).item())") == [(first[0], again[0])]
