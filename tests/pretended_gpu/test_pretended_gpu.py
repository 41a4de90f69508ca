"""labkit on pretended GPUs (`tests/pretended_gpu`): 1, 2 and 4 of them, with fewer, as many and more ranks.

One program for each number of GPUs makes all calls, as a notebook would; the tests look at what came of them. The whole
table is for `make test-wide`.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests import pretended_gpu
from tests.support import prefork
from tests.support.tiers import few
from tests.tools.run_notebooks import FOLDER, LESSONS, execute

pytestmark = pytest.mark.spawns
MACHINES = (1, 2, 4)
"""GPUs of a laptop and of Colab, of Kaggle, of a small server."""

OWN, SHARED = "cpu:gloo,cuda:nccl", "gloo"


@functools.cache
def calls_on(gpus):
    """Run `tests.pretended_gpu.calls` on so many GPUs, and return what it found."""
    with tempfile.TemporaryDirectory() as folder:
        own = pretended_gpu.environment(gpus, Path(folder) / "log", LABKIT_PRETENDED_ASSERT="1")
        command = [sys.executable, "-m", "tests.pretended_gpu.calls", folder]
        ended = subprocess.run(
            command, env={**os.environ, **own}, cwd=pretended_gpu.ROOT, capture_output=True, text=True
        )
        file = Path(folder) / "found.json"
        assert file.exists(), ended.stderr[-3000:]
        return json.loads(file.read_text())


@pytest.fixture(params=few(MACHINES, lambda gpus: gpus == 2))
def gpus(request):
    return request.param


@pytest.fixture
def found(gpus):
    return calls_on(gpus)


def what(found, run, *kinds):
    """What the ranks of a run did with CUDA, of these kinds."""
    return [call for call in found["calls"] if call["pid"] in run["pids"] and call["what"] in kinds]


# Where ranks compute


def test_each_rank_has_a_gpu_of_its_own(gpus, found):
    run = found["by_default"]
    assert run["error"] == run["placement"] == ""
    assert run["devices"] == [f"cuda:{rank}" for rank in range(gpus)]
    for rank, result in enumerate(run["results"]):
        assert result == {
            "device": f"cuda:{rank}",
            "backend": OWN,
            "sees": gpus,
            "local rank": str(rank),
            "current": rank,
        }


def test_a_rank_sets_its_device_before_it_joins_nccls_group_and_uses_no_other(gpus, found):
    run = found["by_default"]
    for rank in range(gpus):
        mine = [call for call in what(found, run, "set_device", "init_process_group") if call["rank"] == str(rank)]
        assert [call["what"] for call in mine][:2] == ["set_device", "init_process_group"]
        joined = next(call for call in mine if call["what"] == "init_process_group")
        assert (joined["device_id"], joined["current"], joined["backend"]) == (f"cuda:{rank}", rank, OWN)
    contexts = what(found, run, "context")
    assert sorted((call["rank"], call["device"]) for call in contexts) == [(str(r), r) for r in range(gpus)]


def test_more_ranks_than_gpus_compute_on_the_cpu_and_the_run_says_so(gpus, found):
    run = found["too_many_ranks"]
    assert run["error"] == ""
    assert {result["device"] for result in run["results"]} == {"cpu"}
    assert {result["backend"] for result in run["results"]} == {"gloo"}
    assert {result["sees"] for result in run["results"]} == {0}
    some = f"{gpus} GPU" + "s" * (gpus > 1)
    assert run["placement"] == f'{2 * gpus} ranks, {some}: they compute on the CPU (device="cuda" has them share)'
    assert what(found, run, "initialise", "context") == []


def test_ranks_share_gpus_where_they_are_to_and_the_run_says_which(gpus, found):
    run = found["sharing"]
    assert run["error"] == ""
    assert run["devices"] == [f"cuda:{rank % gpus}" for rank in range(2 * gpus)]
    shared = ", ".join(f"2 ranks share cuda:{index}" for index in range(gpus))
    assert run["placement"] == f"{shared} (by gloo: without send, recv and DTensor)"
    assert {result["backend"] for result in run["results"]} == {SHARED}
    assert [result["current"] for result in run["results"]] == [rank % gpus for rank in range(2 * gpus)]


def test_ranks_that_are_to_be_on_the_cpu_do_not_touch_cuda(found):
    run = found["on_the_cpu"]
    assert run["results"][0]["device"] == "cpu"
    assert run["results"][0]["sees"] == 0
    assert what(found, run, "initialise", "context", "set_device") == []


def test_the_notebook_itself_never_touches_cuda(found):
    assert not found["initialised here"]
    assert [call for call in found["calls"] if call["pid"] == found["pid"]] == []


def test_a_script_for_torchrun_sets_itself_up(gpus, found):
    own, on_cpu = found["as_under_torchrun"]
    assert own["results"] == [[f"cuda:{rank}", str(float(gpus))] for rank in range(gpus)]
    assert on_cpu["results"] == [["cpu", str(2.0 * gpus)]] * (2 * gpus)


# Reserved ranks


def test_a_rank_whose_context_is_broken_is_replaced_and_the_report_says_so(gpus, found):
    session = found["reserved"]
    failed = session["failed"]
    assert f"rank {gpus - 1} failed: " in failed["error"]
    assert "CUDA error: device-side assert triggered" in failed["error"]
    assert 'labkit.explain("device_side_assert")' in failed["error"]
    assert f"a kernel has failed on the GPU of rank {gpus - 1}" in failed["output"]
    assert session["again"]["error"] == ""
    before, after = session["first"]["pids"], session["again"]["pids"]
    assert [one == other for one, other in zip(before, after, strict=True)] == [True] * (gpus - 1) + [False]


def test_peak_memory_is_that_of_all_devices_and_is_given_back_when_a_run_ends(gpus, found):
    held = found["reserved"]["held"]
    assert held["error"] == ""
    assert all(peak >= gpus * 2**20 for peak in held["peak"])
    assert found["reserved"]["again"]["peak"] == [8] * gpus, "measured anew"
    assert what(found, held, "empty_cache")


def test_cells_compute_on_gpus_too(gpus, found):
    assert found["reserved"]["cells"] == [[f"cuda:{rank}", [float(gpus)] * 2] for rank in range(gpus)]


def test_all_that_runs_on_a_session_runs_on_one_kind_of_device(gpus, found):
    one, all_of_them = found["reserved"]["of many"]
    assert set(one["devices"]) == set(all_of_them["devices"]) == {"cpu"}


# Lessons


@functools.cache
def forker(imported=prefork.RANKS):
    """As `prefork.forker`, but what it forks has pretended GPUs."""
    return prefork.Forker.start(imported)


def run_lesson(name, gpus, folder):
    # What a lesson that is red has not removed goes with the folder. Its path is short: sockets lie there.
    with (
        tempfile.TemporaryDirectory() as own,
        pretended_gpu.machine(gpus, folder / "log", TMPDIR=own) as calls,
        prefork.in_use(forker=forker),
    ):
        execute(FOLDER / f"{name}.ipynb", folder)
    return calls()


UNDECIDED = {"02", "06", "07", "08", "09", "10", "16", "20", "21"}
"""What pretence cannot decide: see `notebooks/guide/limits.md`."""


@pytest.mark.notebook
@pytest.mark.parametrize(
    ("name", "gpus"),
    [
        *(pytest.param(name, 4, marks=pytest.mark.wide) for name in ("00_start_here", "22_cutting_the_sequence")),
        *(
            pytest.param(lesson.stem, 2, marks=pytest.mark.long)
            for lesson in LESSONS
            if lesson.stem[:2] not in UNDECIDED
        ),
    ],
)
def test_a_lesson_is_green_on_pretended_gpus(name, gpus, tmp_path):
    calls = run_lesson(name, gpus, tmp_path)
    assert gpus == 2 or {call["rank"] for call in calls if call["what"] == "communicator"}, "NCCL was used"
