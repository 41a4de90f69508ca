"""The folder of a run elsewhere: one user's alone, not read where it is not, and seldom looked at."""

from __future__ import annotations

import os
import stat
import time

import pytest

import labkit
from labkit.launchers import run_folder
from labkit.launchers.job_events import Restarted
from labkit.launchers.run_folder import RunFolder, Streams
from labkit.protocol import events
from labkit.protocol.job import Job
from tests.support.fake_engine import a_job

ABOUT = {"launcher": "slurm", "job": "5", "nodes": 1, "ranks_per_node": 2, "world_size": 2}


@pytest.fixture
def folder(tmp_path):
    """A run's folder in which a node has reported."""
    made = RunFolder.new(tmp_path / "labkit-runs", "a run / of mine")
    made.create(a_job(), ABOUT)
    made.stream(0, 0).put([events.Started(0)])
    made.ask("stop")
    return made


@pytest.mark.parametrize("umask", [0o000, 0o077], ids=oct)
def test_whatever_the_umask_the_folder_and_its_files_are_one_users_alone(umask, request, tmp_path):
    before = os.umask(umask)
    try:
        folder = request.getfixturevalue("folder")
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.path.iterdir()}
    assert modes == dict.fromkeys(["run.json", "job", "asked", "0.0.stream"], 0o600)
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    assert isinstance(folder.job(), Job)
    assert folder.about() == ABOUT


@pytest.mark.parametrize("mode", [0o020, 0o002], ids=["by the group", "by everybody"])
@pytest.mark.parametrize("what", [".", "job", "run.json", "0.0.stream"])
def test_what_others_could_have_written_is_not_read(folder, what, mode):
    path = folder.path / what
    path.chmod(stat.S_IMODE(path.stat().st_mode) | mode)
    for read in (folder.about, lambda: labkit.attach(folder.path)):
        with pytest.raises(ValueError, match=r"others than you can write into .*: chmod -R go-w "):
            read()
    path.chmod(stat.S_IMODE(path.stat().st_mode) & ~0o022)
    assert folder.about() == ABOUT, "as the message says"


def test_what_is_another_users_is_not_read(folder, monkeypatch):
    monkeypatch.setattr(run_folder.os, "getuid", lambda: os.geteuid() + 1)
    with pytest.raises(ValueError, match="belongs to another user"):
        folder.about()


def test_git_leaves_a_new_folder_of_runs_alone_and_what_was_there_before_as_it_is(tmp_path):
    (tmp_path / "mine").mkdir()
    for parent in ("labkit-runs", "labkit-runs", "mine"):
        RunFolder.new(tmp_path / parent, "run").create(a_job(), {})
    assert (tmp_path / "labkit-runs" / ".gitignore").read_text() == "*\n"
    assert not (tmp_path / "mine" / ".gitignore").exists()
    assert not (tmp_path / ".gitignore").exists()


def test_a_folder_that_cannot_be_made_says_what_to_give(tmp_path):
    (tmp_path / "a file").touch()
    with pytest.raises(OSError, match=r"cannot be made: Not a directory.*give another with folder=…"):
        RunFolder(tmp_path / "a file" / "run").create(a_job(), {})


def test_what_is_cut_off_at_any_place_comes_once_and_whole_when_the_rest_is_there(tmp_path):
    whole = tmp_path / "whole"
    said = [events.Started(0), events.Output(0, "x" * 50), events.Result(0, b"y" * 100)]
    run_folder.Stream(whole).put(said)
    data = whole.read_bytes()
    for cut in range(1, len(data), 7):
        there = tmp_path / f"cut {cut}"
        there.mkdir()
        (there / "0.0.stream").write_bytes(data[:cut])
        streams = Streams(there, 1)
        found = streams.read()
        (there / "0.0.stream").write_bytes(data)
        deadline = time.monotonic() + 10
        while len(found) < 3 and time.monotonic() < deadline:
            found += streams.read()
        assert (found, streams.read()) == (said, [])


def test_who_reads_late_learns_of_every_attempt_that_began_again_where_it_did(tmp_path):
    for attempt in range(3):
        run_folder.Stream(tmp_path / f"0.{attempt}.stream").put([events.Output(0, str(attempt))])
    again = [Restarted(-1, 1), Restarted(-1, 2)]
    first, second, third = (events.Output(0, str(attempt)) for attempt in range(3))
    assert Streams(tmp_path, 1).read() == [first, again[0], second, again[1], third]


def test_a_full_disk_is_waited_for_and_nothing_is_lost(tmp_path, monkeypatch):
    real, failures = os.writev, iter([True, True, False, True, False])

    def writev(descriptor, parts):
        if next(failures, False):
            raise OSError(28, "No space left on device")
        return real(descriptor, [parts[0][:3]])  # and what fits is written in part

    monkeypatch.setattr(os, "writev", writev)
    monkeypatch.setattr(run_folder, "RETRY_S", 0.01)
    run_folder.Stream(tmp_path / "0.0.stream").put([events.Output(0, "what was printed")])
    assert Streams(tmp_path, 1).read() == [events.Output(0, "what was printed")]
