"""What lies in a run's directory is run as code: it is one user's alone, and is not read where it is not."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import cloudpickle
import pytest

from labkit.launchers import supervisor
from labkit.launchers.directory_engine import new_directory
from labkit.launchers.ray.mirror import NotebookSide, RankSide
from labkit.launchers.run_directory import private
from labkit.launchers.run_directory.sender import FileSender
from labkit.protocol import events
from labkit.system import host, linux
from tests.support.fake_engine import a_job
from tests.support.session_files import SessionDirectory


def made_in(folder):
    """A run's directory in which a rank has reported, and a session's with one job."""
    run = new_directory(folder, "run")
    run.create(a_job(), {"launcher": "slurm"})
    FileSender(run.file(0, 0, "records")).send(events.Started(0))
    run.ask("stop")
    session = SessionDirectory(folder / "session")
    session.create_for_jobs({"launcher": "slurm"})
    session.of_job(1).create(a_job(), {"launcher": "session"})
    return run, session


def modes_below(folder):
    """The modes of all that labkit has made there."""
    return {path: stat.S_IMODE(path.lstat().st_mode) for path in folder.rglob("*")}


@pytest.fixture(params=[0o000, 0o002, 0o022, 0o077], ids=oct)
def umask(request):
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def test_whatever_the_umask_folders_and_files_are_one_users_alone(tmp_path, umask):
    run, session = made_in(tmp_path / "not there yet" / "labkit-runs")
    modes = modes_below(tmp_path)
    assert len(modes) > 15
    for path, mode in modes.items():
        assert mode == (0o700 if path.is_dir() else 0o600), path
    for directory in (run, session.of_job(1)):
        directory.about()
        directory.job()


def test_no_moment_sees_them_with_another_mode(tmp_path, monkeypatch):
    """Made open, and closed afterwards, they could be opened in between."""
    seen = []
    real = {name: getattr(os, name) for name in ("mkdir", "open")}

    def mkdir(path, mode=0o777, **options):
        seen.append((path, mode))
        real["mkdir"](path, mode, **options)

    def opened(path, flags, mode=0o777, **options):
        if flags & os.O_CREAT:
            seen.append((path, mode))
        return real["open"](path, flags, mode, **options)

    monkeypatch.setattr(os, "mkdir", mkdir)
    monkeypatch.setattr(os, "open", opened)
    made_in(tmp_path / "labkit-runs")
    monkeypatch.undo()
    below = [(path, mode) for path, mode in seen if Path(path).is_relative_to(tmp_path)]
    assert {mode for _, mode in below} == {0o700, 0o600}
    assert len(below) >= len(modes_below(tmp_path)), "all was made so"


def test_so_is_what_a_supervisor_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: None)
    before = os.umask(0)
    try:
        supervisor.Child(tmp_path / "0.0", "module", [])
    finally:
        os.umask(before)
    assert modes_below(tmp_path) == {tmp_path / "0.0.out": 0o600}


def test_so_is_what_comes_to_a_node_of_ray(tmp_path, umask):
    _, session = made_in(tmp_path / "here")
    side = NotebookSide(session.path)
    side.begin()
    session.give_job(1, [0])
    node = tmp_path / "node"
    node.mkdir(mode=0o700)
    RankSide(node, side.for_rank(0)).take(side.news())
    modes = modes_below(node)
    assert node / "jobs" / "1" / "job.pkl" in modes
    for path, mode in modes.items():
        assert mode == (0o700 if path.is_dir() else 0o600), path
    SessionDirectory(node).of_job(1).job()


def test_git_leaves_a_new_folder_of_runs_alone_and_what_was_there_before_as_it_is(tmp_path):
    repository, mine = tmp_path / "repository", tmp_path / "mine"
    repository.mkdir()
    mine.mkdir()
    new_directory(repository / "labkit-runs", "one").create(a_job(), {})
    new_directory(repository / "labkit-runs", "two").create(a_job(), {})
    new_directory(mine, "three").create(a_job(), {})
    assert (repository / "labkit-runs" / ".gitignore").read_text().splitlines()[-1] == "*"
    assert not (repository / ".gitignore").exists()
    assert not (mine / ".gitignore").exists()


# Reading


def open_up(directory, what, mode):
    path = {"folder": directory.path, "ranks": directory.ranks}.get(what, directory.path / what)
    path.chmod(stat.S_IMODE(path.stat().st_mode) | mode)
    return path


@pytest.mark.parametrize("mode", [0o020, 0o002], ids=["by the group", "by everybody"])
@pytest.mark.parametrize("what", ["folder", "ranks", "job.pkl"])
def test_a_job_that_others_could_have_written_is_not_unpickled(tmp_path, monkeypatch, what, mode):
    run, _ = made_in(tmp_path)
    unpickled = []
    monkeypatch.setattr(cloudpickle, "load", unpickled.append)
    path = open_up(run, what, mode)
    with pytest.raises(ValueError, match=r"others than you can write into .*: chmod -R go-w ") as refused:
        run.job()
    assert str(path) in str(refused.value)
    assert not unpickled
    path.chmod(stat.S_IMODE(path.stat().st_mode) & ~0o022)
    run.job()
    assert unpickled, "as the message says"


@pytest.mark.parametrize("what", ["folder", "ranks", "run.json"])
def test_nor_is_what_the_ranks_take_modules_from(tmp_path, what):
    """run.json says which folders go into `sys.path`, and results lie in `ranks`."""
    run, _ = made_in(tmp_path)
    open_up(run, what, 0o020)
    with pytest.raises(ValueError, match="others than you can write into"):
        run.about()


def test_a_file_system_that_shows_every_file_as_everybodys_is_named_before_ranks_start(tmp_path, monkeypatch):
    real = os.stat

    def everybodys(path, **options):
        status = real(path, **options)
        return os.stat_result((status.st_mode | 0o777, *status[1:]))

    monkeypatch.setattr(private.os, "stat", everybodys)
    with pytest.raises(ValueError, match=r"Where the file system shows every file so, give a folder=… elsewhere"):
        new_directory(tmp_path, "run").create(a_job(), {})


def test_one_that_shows_other_owners_too(tmp_path, monkeypatch):
    run, _ = made_in(tmp_path)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(ValueError, match=r"belongs to another user; .* you are 12345: .*give a folder=… elsewhere"):
        run.about()


# The mask of new files


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it can only be read by being set")
def test_to_look_at_the_umask_does_not_set_it(umask, monkeypatch):
    monkeypatch.setattr(os, "umask", lambda mask: pytest.fail(f"set to {mask:o}"))
    assert host.umask() == umask


def test_where_it_must_be_set_for_that_it_hides_files_meanwhile(umask, monkeypatch):
    asked, real = [], os.umask
    monkeypatch.setattr(linux, "_read", lambda _: (_ for _ in ()).throw(FileNotFoundError()))
    monkeypatch.setattr(os, "umask", lambda mask: (asked.append(mask), real(mask))[1])
    assert host.umask() == umask
    assert asked == [0o077, umask]
