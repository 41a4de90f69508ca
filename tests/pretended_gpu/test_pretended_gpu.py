"""labkit on pretended GPUs (`tests/pretended_gpu`): 1, 2 and 4 of them, with fewer, as many and more ranks.

One program for each number of GPUs makes all calls, as a notebook would; the tests look at what came of them. The whole
table, and every lesson, is for `make test-long`.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import papermill
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


def test_a_tensor_on_a_broken_device_cannot_be_logged_and_the_error_is_the_devices(found):
    error = found["reserved"]["logged"]["error"]
    assert "CUDA error: device-side assert triggered" in error
    assert "takes one number" not in error


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


def test_every_form_of_cuda_visible_devices_is_counted_as_cuda_does(gpus, found):
    for given, devices in found["visible_devices"].items():
        count = {"": 0, "9": 0}.get(given, 2 if given == f"{gpus - 1},0" and gpus > 1 else 1)
        assert devices == ([f"cuda:{rank}" for rank in range(count)] or ["cpu", "cpu"]), given


# Lessons

UNDECIDED = {
    "20_sharding_a_gpt": (
        2,
        "it measures how far 16 bits are off, and CUDA's autocast leaves the CPU's tensors alone",
    ),
    "07_compare": (2, "it counts NCCL's calls by the profiler's events, and a pretended device has none"),
    "10_who_is_late": (1, "it needs steps that are shorter than loading, and a pretended device is as slow as a CPU"),
    "21_tensor_parallel": (
        4,
        "it compares counted bytes with a formula, and some of DTensor's tensors lose their mark: they count as gloo's",
    ),
}
"""What pretence cannot decide, from how many GPUs on, each with its reason: it may be red there."""

TOO_LARGE = {"06_pipeline": 4, "09_scaling": 4}
"""Lessons that compute, from so many GPUs on, as much as keeps them busy: hours on a CPU."""


def test_the_guide_names_the_lessons_that_are_undecided():
    page = pretended_gpu.ROOT / "notebooks" / "guide" / "limits.md"
    (said,) = re.findall(r"lessons it cannot decide.*?reasons", page.read_text(encoding="utf-8"), re.DOTALL)
    lessons = {name.partition("_")[0] for name in (*UNDECIDED, *TOO_LARGE)}
    assert set(re.findall(r"\b\d\d\b", said)) == lessons


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


@pytest.mark.notebook
@pytest.mark.wide
@pytest.mark.parametrize(("name", "gpus"), [("00_start_here", 2), ("22_cutting_the_sequence", 4)])
def test_a_lesson_is_green_on_pretended_gpus(name, gpus, tmp_path):
    calls = run_lesson(name, gpus, tmp_path)
    assert {call["rank"] for call in calls if call["what"] == "communicator"}, "NCCL was used"


@pytest.mark.long
@pytest.mark.notebook
@pytest.mark.parametrize("name", [lesson.stem for lesson in LESSONS])
@pytest.mark.parametrize("gpus", MACHINES)
def test_every_lesson_is_green_on_pretended_gpus(name, gpus, tmp_path):
    if gpus >= TOO_LARGE.get(name, math.inf):
        pytest.xfail("it computes as much as keeps GPUs busy: not run")
    try:
        run_lesson(name, gpus, tmp_path)
    except papermill.PapermillExecutionError as error:
        least, why = UNDECIDED.get(name, (math.inf, ""))
        if gpus >= least:
            pytest.xfail(f"{why}: {error}")
        raise
