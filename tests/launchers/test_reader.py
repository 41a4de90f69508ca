"""What the notebook reads of a run's folder while ranks write there: whole, in order, not more than it can hold."""

from __future__ import annotations

import errno
import json
import os
import shutil
import time

import cloudpickle
import pytest

from labkit.launchers.run_directory import directory as run_directory
from labkit.launchers.run_directory import files, growing, reader
from labkit.launchers.run_directory.directory import RunDirectory
from labkit.launchers.run_directory.growing import Lines
from labkit.launchers.run_directory.reader import DirectoryReader
from labkit.launchers.run_directory.records import decoded, encoded
from labkit.launchers.run_directory.sender import FileSender
from labkit.protocol import events
from tests.conftest import LONG_S, wait_until
from tests.launchers.test_directory_engine import Launcher, Rank, follow, log
from tests.support.fake_engine import a_job


def result(rank, size):
    return events.Result(rank, cloudpickle.dumps(bytes(size)))


def of(kind, found):
    return [event for event in found if isinstance(event, kind)]


def warnings(found):
    return [event.text for event in of(events.Warned, found)]


# Large values


def in_one_piece(found):
    return [e._replace(blob=e.blob.to_bytes()) if isinstance(e, events.Result) else e for e in found]


def test_of_large_results_one_is_read_at_a_look_so_that_memory_stays_bounded(directory):
    sent = [result(rank, 5_000_000) for rank in range(3)]
    for each in sent:
        FileSender(directory.file(each.rank, 0, "records")).send(each)
    FileSender(directory.file(3, 0, "records")).send(events.Started(3))
    looks = DirectoryReader(directory)
    first = in_one_piece(looks.read())
    assert first == [sent[0], events.Started(3)], "what is small need not wait"
    assert looks.has_more
    assert looks.is_behind
    assert in_one_piece(looks.read() + looks.read()) == sent[1:]


def test_a_result_whose_file_is_seen_late_keeps_its_place(directory):
    rank, looks = Rank(directory, 0), DirectoryReader(directory)
    rank.send(result(0, 100_000))
    rank.end()
    (file,) = directory.ranks.glob("*.blob")
    data = file.read_bytes()
    for seen in (None, data[:50], data[:-1]):
        file.unlink(missing_ok=True) if seen is None else file.write_bytes(seen)
        assert looks.read() == []
        assert looks.is_behind
        assert not looks.has_more, "to look again at once is of no use"
    file.write_bytes(data)
    assert [type(event) for event in looks.read()] == [events.Result, events.Exit]


def test_a_result_whose_file_is_gone_says_so_when_it_is_read(directory, monkeypatch):
    monkeypatch.setattr(reader, "SEEN_LATE_S", 0.0)
    rank = Rank(directory, 0)
    rank.send(result(0, 100_000))
    rank.end()
    (file,) = directory.ranks.glob("*.blob")
    file.unlink()
    found, end = DirectoryReader(directory).read()
    assert isinstance(end, events.Exit)
    with pytest.raises(OSError, match=r"the result of rank 0, 100,0\d\d bytes, cannot be read: .*0\.0\.1\.blob"):
        cloudpickle.loads(found.blob)


@pytest.mark.parametrize("name", ["../../secret", "0.0.1.blob/../x", "/etc/passwd", "0.0.records", 5])
def test_a_record_names_no_file_but_a_ranks(name):
    with pytest.raises(ValueError, match="no record"):
        decoded(json.dumps(["Result", 0, {"file": [name, 10]}]).encode())


def test_to_read_a_long_line_takes_no_longer_by_the_byte(tmp_path, monkeypatch):
    monkeypatch.setattr(growing, "BLOCK_BYTES", 1 << 14)

    def seconds(blocks):
        (tmp_path / "file").write_bytes(bytes(blocks << 14) + b"\n")
        lines, began = Lines(tmp_path / "file"), time.perf_counter()
        found = []
        while not found:
            found = lines.new()
        assert len(found[0]) == blocks << 14
        return time.perf_counter() - began

    few, many = min(seconds(500) for _ in range(3)), min(seconds(8000) for _ in range(2))
    assert many < 80 * few, "16 times as long, not 256"


# The end


@pytest.fixture
def launched(tmp_path):
    from labkit.launchers.directory_engine import LaunchedEngine

    def launch(world_size=1):
        launched = Launcher(world_size, RunDirectory(tmp_path / "run"), {})
        launched.directory.create(a_job(), {})
        launched.is_started = True
        return LaunchedEngine(launched), launched.directory

    return launch


def test_no_run_is_settled_while_a_line_is_not_whole(launched):
    engine, directory = launched()
    rank = Rank(directory, 0)
    line = encoded("Result", 0, {"bytes": "gARLBy4="}) + encoded("Exit", 0, 0, "", False, time.time())
    with rank.files[0].open("ab") as file:
        file.write(line[:30])
    run = follow(engine)
    engine.launched.settle(0.0)
    time.sleep(0.5)
    assert not run.over.is_set()
    with rank.files[0].open("ab") as file:
        file.write(line[30:])
    run.wait(LONG_S)
    assert (run.status, run.results) == ("finished", [7])


def test_a_line_that_is_never_whole_does_not_keep_a_run_from_its_end(launched, monkeypatch):
    monkeypatch.setattr(growing, "LINE_S", 0.2)
    engine, directory = launched()
    with Rank(directory, 0).files[0].open("ab") as file:
        file.write(b'["Log", 0')
    run = follow(engine)
    engine.launched.settle(0.0)
    assert run.over.wait(LONG_S)
    assert str(run.error).startswith("rank 0 vanished")


def test_no_run_is_settled_while_a_file_still_grows(launched, monkeypatch):
    monkeypatch.setattr(growing, "BLOCK_BYTES", 1000)
    engine, directory = launched()
    rank = Rank(directory, 0)
    for step in range(300):
        rank.send(log(0, step))
    rank.print("x" * 50_000 + "\n")
    rank.send(events.Result(0, cloudpickle.dumps("well")))
    rank.end()
    engine.launched.settle(0.0)
    run = follow(engine)
    run.wait(LONG_S)
    assert run.results == ["well"]
    assert len(run.history) == 300
    assert "x" * 10_000 in run.output[0]


# What cannot be read


def test_records_that_are_none_are_counted_and_said(directory):
    with directory.file(1, 0, "records").open("wb") as file:
        for line in (
            b"\n",
            encoded("Started", 1),
            b"\xff\xfe garbage\n",
            b'["Change", 1]\n',
            b'["Exit", "one", 0, "", false, 0.0, false]\n',
            b'["Log", 1, ["loss"], {"q": [1]}, {"d": [0.1]}, {"d": [1.0, 2.0]}]\n',
            b'["Log", 1, ["loss"], {"d": [1]}, {"d": [0.1]}, {"d": [1.0]}]\n',
            b'["Expect", 1, ' + b"9" * 400 + b"]\n",
            encoded("Started", 0),
            b"[" * 100_000 + b"\n",
            b'["Log", 1, ["lo\x18\n',  # begun on a full disk, and written anew
            encoded("Expect", 1, 7),
        ):
            file.write(line)
    found = DirectoryReader(directory).read()
    assert found[:-1] == [events.Started(1), events.Expect(1, 7)]
    assert warnings(found) == ["rank 1: 8 records are damaged or cut short, and left out"]


def test_a_folder_that_cannot_be_read_is_named_after_a_while_and_looked_for_on(directory, monkeypatch):
    monkeypatch.setattr(reader, "UNREADABLE_S", 0.1)
    Rank(directory, 0).send(events.Started(0))
    looks = DirectoryReader(directory)
    assert looks.read() == [events.Started(0)]
    listdir, stale = os.listdir, OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    def fails(path):
        raise stale

    monkeypatch.setattr(os, "listdir", fails)
    assert looks.read() == [], "for a moment that is nothing"
    time.sleep(0.15)
    (said,) = warnings(looks.read())
    assert said.startswith(f"{directory.ranks} cannot be read for 0 s: Stale file handle. The ranks may be well")
    assert looks.read() == [], "once"
    assert not looks.is_gone
    monkeypatch.setattr(os, "listdir", listdir)
    assert warnings(looks.read()) == [""]


@pytest.mark.parametrize("how", ["deleted", "moved", "deleted with the folder of all runs", "unmounted"])
def test_a_folder_that_was_deleted_is_told_from_one_that_is_out_of_reach(tmp_path, monkeypatch, how):
    monkeypatch.setattr(files, "GONE_S", 0.0)
    (tmp_path / "runs" / "run").mkdir(parents=True)
    seen = files.Folder(tmp_path / "runs" / "run")
    seen.look_now()
    if how == "moved":
        (tmp_path / "runs" / "run").rename(tmp_path / "elsewhere")
    else:
        shutil.rmtree(tmp_path / "runs" / ("run" if how == "deleted" else ""))
    if how == "unmounted":
        seen._device += 1
    seen.look_now()
    assert seen.is_gone is (how != "unmounted")


def test_a_run_whose_folder_was_deleted_ends_and_says_so(launched, monkeypatch):
    monkeypatch.setattr(files, "GONE_S", 0.1)
    engine, directory = launched(2)
    for number in range(2):
        Rank(directory, number).send(log(number, 0))
    run = follow(engine)
    wait_until(lambda: len(run.history) == 2)
    shutil.rmtree(directory.path)
    assert run.over.wait(LONG_S)
    assert engine.launched.was_ended
    assert run.error.rank is None
    assert str(run.error).startswith(f"the run's folder {directory.path} has gone\n\nIt was deleted or moved while the")
    assert len(run.history) == 2, "what had come is kept"


# What is printed without end


def test_output_without_end_is_cut_and_read_on(directory, monkeypatch):
    monkeypatch.setattr(files, "OUTPUT_BYTES", 10_000)
    monkeypatch.setattr(files, "HEAD_BYTES", 100)
    rank, looks, found, cuts = Rank(directory, 0), DirectoryReader(directory), [], 0
    for number in range(5000):
        rank.print(f"line {number}\n")
        if number % 10 == 0:
            before = rank.files[1].stat().st_size
            files.limit_output(rank.files[1])
            cuts += rank.files[1].stat().st_size < before
            found += looks.read()
        assert rank.files[1].stat().st_size < 11_000
    rank.end()
    found += looks.read()
    text = "".join(event.text for event in of(events.Output, found))
    lines = [line for line in text.splitlines() if line.startswith("line")]
    assert lines[-3:] == ["line 4997", "line 4998", "line 4999"]
    assert text.count("bytes of output were dropped here; the first of them are in 0.0.out.head ...") == cuts > 2
    assert directory.file(0, 0, "out.head").read_text() == "".join(f"line {n}\n" for n in range(50))[:100]


# Clocks


@pytest.mark.parametrize("off_s", [3600.0, -3600.0])
def test_a_rank_whose_clock_is_off_reports_by_the_notebooks(directory, monkeypatch, off_s):
    mine = FileSender(directory.file(0, 0, "records"))
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + off_s)  # of a node; its file system's is the notebook's
    mine.clock_off_s = files.clock_off_s(directory.path, mine.path)
    assert mine.clock_off_s == pytest.approx(off_s, abs=1.0)
    began_s = real()
    mine.send(log(0, 1)._replace(times_s=log(0, 1).times_s.__class__("d", [time.time() - began_s])))
    mine.send(events.Failure(0, time.time() - began_s, "running", "ValueError", ""))
    mine.send(events.Exit(0, 1, at_s=time.time()))
    monkeypatch.setattr(time, "time", real)
    logged, failure, end = DirectoryReader(directory).read()
    assert logged.times_s[0] == pytest.approx(0.0, abs=5.0)
    assert failure.time_s == pytest.approx(0.0, abs=5.0)
    assert end.at_s == pytest.approx(real(), abs=5.0)


def test_clocks_that_hardly_differ_are_left_alone_as_are_those_that_nobody_can_compare(
    directory, tmp_path, monkeypatch
):
    (directory.ranks / "0.0.records").touch()
    assert files.clock_off_s(directory.path, directory.ranks / "0.0.records") == 0.0
    assert files.clock_off_s(directory.path, directory.ranks / "not there") == 0.0
    (tmp_path / "copy" / "jobs" / "1").mkdir(parents=True)
    (tmp_path / "copy" / files.CLOCK).write_text("-7200.5")
    assert files.clock_off_s(tmp_path / "copy", tmp_path) == -7200.5
    assert files.clock_off_s(tmp_path / "copy" / "jobs" / "1", tmp_path) == -7200.5
    assert run_directory.RunDirectory(directory.path).about()["clock_ahead_s"] == pytest.approx(0.0, abs=2.0)
