"""What ranks write into a run's directory is what the notebook reads there, whenever it looks."""

from __future__ import annotations

import math
import os
import time
from array import array

import cloudpickle
import pytest

from labkit.launchers import job_events, supervisor
from labkit.launchers.directory_engine import LaunchedEngine, new_directory
from labkit.launchers.environments import SlurmVariables
from labkit.launchers.launcher_job import LauncherJob
from labkit.launchers.run_directory.directory import RunDirectory
from labkit.launchers.run_directory.reader import DirectoryReader
from labkit.launchers.run_directory.sender import FileSender
from labkit.protocol import events
from labkit.run import Run
from tests.conftest import LONG_S, wait_until
from tests.support.fake_engine import a_job


def log(rank, *steps, value=1.0):
    count = len(steps)
    return events.Log(rank, ("loss",), array("q", steps), array("d", range(count)), array("d", [value] * count))


class Rank:
    """Writes as a rank and its supervisor do."""

    def __init__(self, directory, rank, attempt=0):
        self.rank, self.files = rank, [directory.file(rank, attempt, kind) for kind in ("records", "out", "stacks")]
        for file in self.files:
            file.touch()
        self.send = FileSender(self.files[0]).send

    def print(self, text):
        with self.files[1].open("a") as file:
            file.write(text)

    def end(self, code=0, ended=False):
        with self.files[0].open("a") as file:
            file.write(f'\n["Exit", {self.rank}, {code}, "", {str(ended).lower()}, {time.time()}]\n')


def test_values_that_are_no_numbers_come_too(directory):
    Rank(directory, 0).send(log(0, 1, value=math.nan))
    (read,) = DirectoryReader(directory).read()
    assert read.names == ("loss",)
    assert read.steps == array("q", [1])
    assert math.isnan(read.values[0])


def test_what_a_rank_printed_comes_before_what_it_then_reported_and_all_of_it_before_its_end(directory, monkeypatch):
    monkeypatch.setattr("labkit.launchers.run_directory.growing.BLOCK_BYTES", 1000)
    rank, reader = Rank(directory, 0), DirectoryReader(directory)
    rank.print("ä" * 2000)
    rank.send(events.Started(0))
    first = reader.read()
    assert [type(record) for record in first] == [events.Output, events.Started]
    assert first[0].text == "ä" * 500
    rank.end()
    found = [record for _ in range(4) for record in reader.read()]
    *output, end = found
    assert isinstance(end, events.Exit)
    assert "".join(record.text for record in output) == "ä" * 1500


def test_a_character_cut_in_two_is_one(directory):
    rank, reader = Rank(directory, 0), DirectoryReader(directory)
    with rank.files[1].open("ab") as file:
        file.write("ä".encode()[:1])
    assert reader.read() == []
    with rank.files[1].open("ab") as file:
        file.write("ä".encode()[1:])
    assert reader.read() == [events.Output(0, "ä")]


# Attempts


def kinds(read):
    return [f"{type(r).__name__} {r.rank}" for r in read]


def test_of_an_earlier_attempt_only_what_was_logged_and_printed_counts(directory):
    for rank in (0, 1):
        first = Rank(directory, rank)
        first.send(events.Started(rank))
        first.send(log(rank, 0, 1))
        first.print("before\n")
        first.end(1)
        Rank(directory, rank, attempt=1).send(events.Started(rank))
    reader = DirectoryReader(directory)
    assert kinds(reader.read()) == ["Output 0", "Log 0", "Output 1", "Log 1", "Restarted -1", "Started 0", "Started 1"]
    assert reader.attempt == 1


def test_the_last_of_an_attempt_comes_before_the_next_begins_for_any_rank(directory):
    first = [Rank(directory, rank) for rank in (0, 1)]
    reader = DirectoryReader(directory)
    first[0].send(log(0, 0))
    first[1].send(log(1, 0))
    assert kinds(reader.read()) == ["Log 0", "Log 1"]
    first[1].send(log(1, 1))
    Rank(directory, 0, attempt=1).send(log(0, 0))
    assert kinds(reader.read()) == ["Log 1", "Restarted -1", "Log 0"]
    assert reader.begun == {0}, "rank 1 has not begun again"
    first[1].end(-9)
    Rank(directory, 1, attempt=1).send(log(1, 0))
    assert kinds(reader.read()) == ["Log 1"]


def test_a_first_attempt_in_which_no_rank_began_is_passed_over(directory):
    Rank(directory, 0, attempt=1).send(events.Started(0))
    assert kinds(DirectoryReader(directory).read()) == ["Restarted -1", "Started 0"]


def test_ranks_under_slurm_take_its_count_of_attempts(directory, monkeypatch):
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    assert supervisor.claim_attempt(directory.path, "0", SlurmVariables()) == 0
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    assert supervisor.claim_attempt(directory.path, "0", SlurmVariables()) == 2


# The run


class Launcher(LauncherJob):
    """Ends when it is told."""

    kind = "test"
    why = None

    def submit(self):
        return {}

    def end(self):
        self.was_ended = True
        self.settle(0.0)

    def ending(self, seen):
        self.missing = seen.missing
        return self.why


@pytest.fixture
def launched(tmp_path):
    def launch(world_size=2):
        launched = Launcher(world_size, RunDirectory(tmp_path / "run"), {})
        launched.directory.create(a_job(), {})
        return LaunchedEngine(launched), launched.directory

    return launch


def follow(engine):
    run = Run(engine, engine.world_size, "test")
    run.follow(a_job())
    return run


def test_ranks_that_ended_well_are_the_end_of_the_run(launched):
    engine, directory = launched()
    for number in (0, 1):
        rank = Rank(directory, number)
        rank.send(events.Result(number, cloudpickle.dumps(number)))
        rank.end()
    run = follow(engine).wait(LONG_S)
    assert (run.status, run.results) == ("finished", [0, 1])


def test_a_rank_that_failed_ends_the_run_only_when_it_cannot_be_started_again(launched):
    engine, directory = launched(1)
    rank = Rank(directory, 0)
    rank.send(log(0, 0, 1, 2))
    rank.send(events.Failure(0, 1.0, "running", "ValueError: bad batch", "Traceback"))
    rank.end(1)
    run = follow(engine)
    wait_until(lambda: run.states == ["failed"])
    again = Rank(directory, 0, attempt=1)
    again.send(log(0, 1, 2, 3))
    again.send(events.Result(0, cloudpickle.dumps("well")))
    again.end()
    run.wait(LONG_S)
    assert (run.status, run.attempt, run.results, run.error) == ("finished", 1, ["well"], None)
    assert run.history["step"].tolist() == [0, 1, 2, 3], "each step once"


def test_a_rank_that_said_nothing_of_its_end_is_blamed_if_nothing_else_explains_it(launched):
    engine, directory = launched()
    Rank(directory, 0).end(-15, ended=True)
    Rank(directory, 1).send(events.Started(1))
    run = follow(engine)
    engine.launched.settle(0.0)
    run.over.wait(LONG_S)
    assert engine.launched.missing == [1]
    assert run.error.rank == 1
    assert str(run.error).startswith("rank 1 vanished without a word\n\nNeither rank 1 nor what minds it")
    assert run.states == ["ended", "failed"]


def test_a_rank_that_had_not_begun_when_another_died_was_ended_by_the_launcher(launched):
    engine, directory = launched()
    Rank(directory, 1).end(5)
    run = follow(engine)
    engine.launched.settle(0.0)
    run.over.wait(LONG_S)
    assert run.error.rank == 1
    assert "(exit code 5)" in run.error.diagnosis.headline
    assert "rank 0 left no word" in str(run.error)
    assert run.states == ["ended", "failed"]


@pytest.mark.parametrize(
    ("summary", "blamed"), [("RuntimeError: Connection closed by peer", 1), ("ValueError: bad batch", 0)]
)
def test_a_rank_that_vanished_is_blamed_before_those_that_lost_their_connection(launched, summary, blamed):
    engine, directory = launched()
    rank = Rank(directory, 0)
    rank.send(events.Failure(0, 1.0, "running", summary, "Traceback"))
    rank.end(1)
    Rank(directory, 1).send(log(1, 7))
    run = follow(engine)
    engine.launched.settle(0.0)
    run.over.wait(LONG_S)
    assert run.error.rank == blamed
    if blamed:
        assert "rank 1 vanished without a word, after logging step 7" in str(run.error)


def test_what_the_launcher_says_of_the_end_goes_before_the_ranks_failures(launched):
    engine, directory = launched()
    engine.launched.why = job_events.JobEnded(-1, "the job lost a node", "Launch it again.", "slurm")
    rank = Rank(directory, 0)
    rank.send(events.Failure(0, 1.0, "running", "RuntimeError: Connection closed by peer", "Traceback"))
    rank.end(1)
    run = follow(engine)
    engine.launched.settle(0.0)
    run.over.wait(LONG_S)
    assert run.error.rank is None
    assert str(run.error).startswith("the job lost a node\n\nLaunch it again.")
    assert "rank 0 lost its connection as a consequence" in str(run.error)


def test_a_run_attached_to_later_ends_when_its_ranks_did(launched):
    engine, directory = launched(1)
    rank = Rank(directory, 0)
    rank.send(events.Result(0, cloudpickle.dumps(1)))
    ended_s = time.time()
    with rank.files[0].open("a") as file:
        file.write(f'["Exit", 0, 0, "", false, {ended_s}]\n')
    run = Run(engine, 1, "test")
    run.follow(a_job()._replace(start_s=ended_s - 100))
    run.wait(LONG_S)
    assert run.elapsed_s == pytest.approx(100)


# The directory


def test_a_folder_that_cannot_be_made_says_what_to_do(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"the run's folder .*file/run cannot be made: Not a directory\. It must be"):
        RunDirectory(tmp_path / "file" / "run").create(a_job(), {})


def test_what_is_no_runs_folder_is_not_read(tmp_path, directory, monkeypatch):
    with pytest.raises(ValueError, match=r"is not the folder of a run: run\.json cannot be read .* `run\.folder`"):
        RunDirectory(tmp_path).about()
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(ValueError, match="belongs to another user; what lies there would be run as code"):
        directory.about()


def test_a_runs_name_becomes_part_of_its_folders(tmp_path):
    name = new_directory(tmp_path, "my / run\n äöü").path.name
    assert "my-run-" in name
    assert name.isascii()
    assert name != new_directory(tmp_path, "my / run\n äöü").path.name
