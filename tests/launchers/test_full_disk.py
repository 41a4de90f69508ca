"""Where a rank cannot write what it has to say: on a full disk, that of a quota, or a file system that fails."""

from __future__ import annotations

import errno
import io
import os
import threading
import time

import pytest

from labkit.launchers.run_directory import files, sender
from labkit.launchers.run_directory.directory import RunDirectory
from labkit.launchers.run_directory.reader import DirectoryReader
from labkit.launchers.run_directory.sender import FileSender, printing_never_fails
from labkit.protocol import events
from labkit.protocol.events import Warned
from tests.conftest import wait_until
from tests.launchers.test_directory_engine import log
from tests.support.fake_engine import a_job


class Disk:
    """Room for so many bytes: `os.write` does with it as a full disk does, which takes what still fits."""

    def __init__(self, monkeypatch):
        self.room = 1 << 30
        self.error = errno.ENOSPC
        self._write = os.write
        monkeypatch.setattr(os, "write", self.write)

    def write(self, descriptor, data):
        if len(data) and self.room <= 0:
            raise OSError(self.error, os.strerror(self.error))
        written = self._write(descriptor, bytes(data[: self.room]))
        self.room -= written
        return written


@pytest.fixture
def disk(monkeypatch):
    monkeypatch.setattr(sender, "RETRY_S", 0.02)
    monkeypatch.setattr(sender, "SETTLED_S", 0.05)
    monkeypatch.setattr(sender, "LAST_TRIAL_S", 0.1)
    return Disk(monkeypatch)


@pytest.fixture
def rank(directory, disk):
    """The sender of rank 0, whose reserve is no room on the disk that is pretended here."""
    made = FileSender(directory.file(0, 0, "records"), keeps_reserve=False)
    yield made
    disk.room = 1 << 30
    made.close()


def steps(found):
    return [step for event in found if isinstance(event, events.Log) for step in event.steps]


def warnings(found):
    return [event.text for event in found if isinstance(event, Warned)]


@pytest.mark.parametrize("room", [0, 1, 20, 57, 100, 333])
@pytest.mark.parametrize("why", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_what_could_not_be_written_is_written_later_whole_and_in_order(rank, directory, disk, room, why):
    rank.send(log(0, 0))
    disk.room, disk.error = room, why
    for step in range(1, 20):
        rank.send(log(0, step))
    disk.room = 1 << 30
    reader, found = DirectoryReader(directory), []

    def said():
        found.extend(reader.read())
        return any("could not be written for" in text for text in warnings(found))

    wait_until(said)
    assert steps(found) == list(range(20))
    assert f"{os.strerror(why)}; all were written later" in warnings(found)[-1]
    assert not any("damaged" in text for text in warnings(found))


def test_what_waits_is_bounded_and_what_is_lost_is_counted(rank, directory, disk, monkeypatch):
    monkeypatch.setattr(sender, "WAITING_BYTES", 500)
    disk.room = 0
    for step in range(100):
        rank.send(log(0, step))
    disk.room = 1 << 30
    rank.close()
    found = DirectoryReader(directory).read()
    late = steps(found)
    assert late == list(range(100 - len(late), 100)), "the newest are kept"
    assert 2 < len(late) < 12
    assert (
        f"rank 0: 100 records could not be written for 0 s: No space left on device; {len(late)} written"
        in (warnings(found)[-1])
    )
    assert warnings(found)[-1].endswith(f"written later, {100 - len(late)} lost")


def test_of_a_rank_that_logs_without_end_the_last_of_each_batch_is_kept(directory, monkeypatch):
    monkeypatch.setattr(sender, "RECORDS_BYTES", 1000)
    rank = FileSender(directory.file(0, 0, "records"))
    for step in range(0, 1000, 10):
        rank.send(log(0, *range(step, step + 10)))
    rank.close()
    found = DirectoryReader(directory).read()
    kept = steps(found)
    assert kept[:10] == list(range(10))
    assert kept[-1] == 999
    assert kept[-50:] == list(range(509, 1000, 10))
    assert len(warnings(found)) == 1
    assert warnings(found)[0].startswith("rank 0 has logged ")


# On a disk that is full


def fill(folder):
    with open(folder / "filling", "ab", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError:
                continue


@pytest.fixture
def there(small_disk, monkeypatch):
    """A run's folder on a disk of 12 MB; to mount it takes a process."""
    monkeypatch.setattr(sender, "RETRY_S", 0.02)
    monkeypatch.setattr(sender, "LAST_TRIAL_S", 0.1)
    made = RunDirectory(small_disk / "run")
    made.create(a_job(), {})
    return made


@pytest.mark.spawns
def test_a_result_waits_for_room(there, small_disk):
    rank = FileSender(there.file(0, 0, "records"))
    (small_disk / "filling").write_bytes(bytes(8_000_000))
    waiting = threading.Thread(target=rank.send, args=(events.Result(0, bytes(6_000_000)),))
    waiting.start()
    reader, found = DirectoryReader(there), []

    def said():
        found.extend(reader.read())
        return warnings(found)

    wait_until(said)
    assert warnings(found)[0] == (
        "the result of rank 0, 6.0 MB, cannot be written: No space left on device. It is tried again for 300 s; make "
        "room"
    )
    os.unlink(small_disk / "filling")
    waiting.join(10)
    found = reader.read()
    assert [event.blob.to_bytes() for event in found if isinstance(event, events.Result)] == [bytes(6_000_000)]
    assert warnings(found) == [""], "no more to say"
    assert len(list(there.ranks.glob("*.blob"))) == 1
    rank.close()


@pytest.mark.spawns
def test_a_result_for_which_no_room_comes_is_a_failure_that_says_so(there):
    rank = FileSender(there.file(0, 0, "records"))
    rank.result_s = 0.1
    with pytest.raises(OSError, match=r"No space left on device: 20\.0 MB for .*ranks"):
        rank.send(events.Result(0, bytes(20_000_000)))
    assert not list(there.ranks.glob("*blob*")), "what was begun takes no room"
    rank.close()


@pytest.mark.spawns
def test_what_a_rank_attaches_and_finds_no_room_is_said_to_be_lost(there):
    rank = FileSender(there.file(0, 0, "records"))
    rank.send(events.Attached(0, "trace", bytes(20_000_000)))
    assert warnings(DirectoryReader(there).read()) == [
        f"rank 0: its trace, 20.0 MB, is lost: No space left on device: 20.0 MB for {there.ranks}"
    ]
    rank.close()


@pytest.mark.spawns
def test_last_words_find_the_room_that_was_kept_for_them(there, small_disk):
    directory = there
    rank = FileSender(directory.file(0, 0, "records"))
    fill(small_disk)
    for step in range(3000):
        rank.send(log(0, step))
    rank.send(events.Failure(0, 1.0, "running", "ValueError: bad batch", "…" * 20_000))
    rank.close()
    files.append(directory.file(0, 0, "records"), ["Exit", 0, 1, "", False, time.time()])  # the supervisor's
    found = DirectoryReader(directory).read()
    assert [type(event).__name__ for event in found if not isinstance(event, events.Log)] == [
        "Warned", "Failure", "Warned", "Exit", *(["Warned"] if "damaged" in warnings(found)[-1] else [])
    ]  # fmt: skip
    assert "No space left on device. The training goes on" in warnings(found)[0]
    assert "lost" in warnings(found)[1]


@pytest.mark.spawns
def test_printing_on_a_full_disk_ends_nothing_and_the_gap_is_said(small_disk):
    fill(small_disk)
    with open(small_disk / "out", "ab") as file:
        out = printing_never_fails(io.TextIOWrapper(file))
        for number in range(100):
            print("lost", number, "." * 100, file=out)
        os.unlink(small_disk / "filling")
        print("and then", file=out)
        out.flush()
        text = (small_disk / "out").read_text()
    said, last = text.strip().splitlines()[-2:]
    assert said.endswith("bytes of output could not be written: No space left on device ...")
    assert last == "and then"


@pytest.mark.spawns
def test_a_supervisor_frees_the_reserve_of_a_rank_that_was_killed(small_disk):
    records = small_disk / "0.0.records"
    FileSender(records)
    fill(small_disk)
    assert files.append(records, ["Exit", 0, -9, "", False, 1.0])
    assert files.has_exit(records)
    assert not records.with_suffix(".reserve").exists()
