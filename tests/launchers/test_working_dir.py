"""What of the notebook's folder Ray is to send."""

from __future__ import annotations

import importlib.util

import pytest

from labkit.launchers.ray.working_dir import NOT_SENT, RUN, local_folder, size_in_words, without_runs


def test_the_runs_folder_and_what_no_rank_needs_stay_here(tmp_path):
    found = without_runs({"working_dir": str(tmp_path), "excludes": ["data"]}, tmp_path / "my" / "runs")
    assert found == {"working_dir": str(tmp_path), "excludes": [*NOT_SENT, "/my/runs", "data"]}
    assert without_runs({"working_dir": str(tmp_path)}, tmp_path)["excludes"][-1] == RUN
    assert without_runs({"working_dir": str(tmp_path)}, tmp_path.parent)["excludes"] == [*NOT_SENT]


@pytest.mark.parametrize("runtime_env", [{}, {"pip": ["x"]}, {"working_dir": "s3://bucket/code.zip"}])
def test_what_is_not_this_machines_folder_is_left_as_it_is(runtime_env, tmp_path):
    assert without_runs(runtime_env, tmp_path) == runtime_env
    assert local_folder(runtime_env) is None
    assert size_in_words(runtime_env) == ""


def test_how_much_comes_along_is_said_with_what_most_of_it_is(tmp_path):
    if importlib.util.find_spec("ray") is None:
        pytest.skip("no Ray here: pip install ray")
    for name, size in {"train.py": 1000, "data/x.bin": 3_000_000, "labkit-runs/r/job.pkl": 9_000_000}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x" * size)
    (tmp_path / "20260301-101500-train-1f2e").mkdir()
    (tmp_path / "20260301-101500-train-1f2e" / "job.pkl").write_bytes(b"x" * 5_000_000)
    environment = without_runs({"working_dir": str(tmp_path)}, tmp_path)
    assert size_in_words(environment) == f"3.0 MB of {tmp_path} come along, of which data has 3.0 MB"
