"""Files cut anywhere, and looks in any order: what is read is what was written."""

from __future__ import annotations

import errno
import math
import os
import shutil
import tempfile
from array import array
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from labkit.launchers.ray import mirror
from labkit.launchers.ray.mirror import NotebookSide, RankSide
from labkit.launchers.run_directory.directory import RunDirectory
from labkit.launchers.run_directory.reader import DirectoryReader
from labkit.launchers.run_directory.records import CUT, decoded, encoded, plain
from labkit.launchers.run_directory.sender import FileSender
from labkit.protocol import events
from tests.support.fake_engine import a_job
from tests.support.session_files import SessionDirectory

MANY = settings(
    deadline=None,
    database=None,
    max_examples=int(os.environ.get("LABKIT_EXAMPLES", "150")),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture
def folder():
    """A folder for each example."""
    made = Path(tempfile.mkdtemp(prefix="any-order-"))

    def new():
        shutil.rmtree(made)
        made.mkdir()
        return made

    yield new
    shutil.rmtree(made)


# The reader

texts = st.text(max_size=20)
floats = st.floats(allow_nan=False)
small = st.integers(-(2**63), 2**63 - 1)
names = st.lists(texts, min_size=1, max_size=3, unique=True).map(tuple)


@st.composite
def logs(draw):
    its_names, calls = draw(names), draw(st.integers(1, 4))
    columns = [draw(st.lists(of, min_size=count, max_size=count)) for of, count in (
        (small, calls), (floats, calls), (floats, calls * len(its_names))
    )]  # fmt: skip
    return events.Log(1, its_names, array("q", columns[0]), array("d", columns[1]), array("d", columns[2]))


records = st.one_of(
    logs(),
    st.builds(events.Started, st.just(1)),
    st.builds(events.Expect, st.just(1), st.integers(1, 2**40)),
    st.builds(events.Result, st.just(1), st.binary(max_size=50)),
    st.builds(events.Failure, st.just(1), floats, texts, texts, texts, st.just((("a cell", 3, "train"),))),
    st.builds(events.Memory, st.just(1), st.integers(0, 2**50), st.integers(0, 2**50)),
    st.builds(events.Attached, st.just(1), texts, st.binary(max_size=50)),
)
garbage = st.binary(max_size=40).map(lambda data: data.replace(b"\n", b""))


def is_none(line):
    """Whether a line is no record of rank 1, and one that counts."""
    try:
        return decoded(line).rank != 1
    except ValueError:
        return bool(line) and not line.endswith(CUT[:-1]) and not line.startswith(b'["Interrupted"')


def line_of(record):
    return encoded(type(record).__name__, *map(plain, record))


@MANY
@given(
    written=st.lists(
        st.one_of(
            records,
            garbage.map(lambda data: data + b"\n"),
            records.flatmap(lambda r: st.integers(0, len(line_of(r)) - 1).map(lambda n: line_of(r)[:n] + CUT)),
            records.flatmap(lambda r: st.integers(0, len(line_of(r)) - 2).map(lambda n: line_of(r)[:n] + b"\n")),
        ),
        max_size=12,
    ),
    cuts=st.lists(st.integers(0, 3000), max_size=12),
    block=st.sampled_from([1 << 22, 64, 7]),
)
def test_records_come_whole_whatever_lies_between_them_and_whenever_one_looks(folder, written, cuts, block):
    directory = RunDirectory(folder() / "run")
    directory.ranks.mkdir(parents=True)
    data = b"".join(line_of(each) if not isinstance(each, bytes) else each for each in written)
    looks, found = DirectoryReader(directory), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("labkit.launchers.run_directory.growing.BLOCK_BYTES", block)
        with open(directory.file(1, 0, "records"), "ab", buffering=0) as file:
            for start, end in zip([0, *sorted(cuts)], [*sorted(cuts), len(data)], strict=True):
                file.write(data[start:end])
                found += looks.read()
        while looks.has_more:
            found += looks.read()
    valid = [decoded(line) for line in data.split(b"\n")[:-1] if line and not is_none(line) and _counts(line)]
    assert [event for event in found if not isinstance(event, events.Warned)] == valid
    assert [each for each in written if not isinstance(each, bytes)] == [each for each in valid if each in written], (
        "no whole record is lost"
    )
    bad = sum(map(is_none, data.split(b"\n")[:-1]))
    assert looks._files[1].unreadable == bad
    assert any(isinstance(event, events.Warned) for event in found) is (bad > 0)


def _counts(line):
    return not line.endswith(CUT[:-1]) and not line.startswith(b'["Interrupted"')


@MANY
@given(data=st.binary(max_size=300), names=st.lists(st.text("0123456789.recodsblu-", max_size=16), max_size=4))
def test_whatever_lies_in_the_folder_the_reader_raises_nothing(folder, data, names):
    directory = RunDirectory(folder() / "run")
    directory.ranks.mkdir(parents=True)
    for name in ["0.0.records", "0.0.out", "0.0.stacks", "1.2.records", *names]:
        if name.strip("."):
            (directory.ranks / name).write_bytes(data)
    looks = DirectoryReader(directory)
    for _ in range(3):
        looks.read()
    assert looks.attempt == max([2, *(int(name.split(".")[1]) for name in names if name.endswith(".records") and all(
        part.isdigit() for part in name.split(".")[:2]) and name.count(".") == 2)])  # fmt: skip


# The mirror

WORDS = st.sampled_from(["stop", "stacks", "end"])
steps = st.lists(
    st.one_of(
        st.tuples(st.just("records"), st.integers(0, 1), st.integers(1, 30)),
        st.tuples(st.just("out"), st.integers(0, 1), st.integers(1, 60)),
        st.tuples(st.just("stacks"), st.integers(0, 1), st.integers(1, 30)),
        st.tuples(st.just("blob"), st.integers(0, 1), st.integers(1, 70)),
        st.tuples(st.just("publish"), st.integers(0, 1), st.integers(0, 5)),
        st.tuples(st.just("ask"), WORDS, st.just(0)),
        st.tuples(st.just("job"), st.just(0), st.just(0)),
        st.tuples(st.just("look at rank"), st.integers(0, 1), st.one_of(st.just(math.inf), st.integers(0, 40))),
        st.tuples(st.just("look at notebook"), st.just(0), st.one_of(st.just(math.inf), st.integers(0, 40))),
    ),
    min_size=5,
    max_size=40,
)
"""What happens: how much is written by which rank; which rank is looked at, with so much room on the disk."""


class Cluster:
    """A notebook's directory and those of two ranks, written to and looked at in any order, on disks that fill up."""

    def __init__(self, folder, patch):
        patch.setattr(mirror, "BLOCK_BYTES", 16)
        self.room = math.inf
        self._write = os.write
        patch.setattr(mirror.os, "write", self.write)
        self.notebook = SessionDirectory(folder / "notebook")
        self.notebook.create_for_jobs({})
        self.side = NotebookSide(self.notebook.path)
        self.side.begin()
        self.ranks = [SessionDirectory(folder / f"node{rank}") for rank in (0, 1)]
        self.sides = [RankSide(there.path, self.side.for_rank(rank)) for rank, there in enumerate(self.ranks)]
        for rank, there in enumerate(self.ranks):
            there.file(rank, 0, "records").touch()
        self.blobs, self.jobs = [0, 0], 0

    def write(self, descriptor, data):
        if len(data) and self.room <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = self._write(descriptor, bytes(data[: int(min(self.room, len(data)))]))
        self.room -= written
        return written

    def append(self, path, data):
        with open(path, "ab") as file:
            file.write(data)

    def folder_of(self, rank):
        """Where a rank writes just now: its own folder's newest job."""
        there = list(self.ranks[rank].path.glob("jobs/*/ranks"))
        return max(there, key=lambda path: int(path.parent.name)) if there else self.ranks[rank].ranks

    def do(self, what, which, size):
        if what in ("records", "out", "stacks"):
            ranks = self.folder_of(which)
            (ranks / f"{which}.0.records").touch()
            self.append(ranks / f"{which}.0.{what}", bytes([65 + size % 26]) * size + b"\n")
        elif what == "blob":
            self.blobs[which] += 1
            ranks, name = self.folder_of(which), f"{which}.0.{self.blobs[which]}.blob"
            (ranks / f".{name}").write_bytes(bytes([self.blobs[which] % 256]) * size)
            (ranks / f".{name}").rename(ranks / name)
            self.append(ranks / f"{which}.0.records", f"{name} {size}\n".encode())
        elif what == "publish":
            RunDirectory(self.folder_of(which).parent).write(f"rendezvous.{size}..{which}.json", b"{}" * size)
        elif what == "ask":
            self.notebook.ask(which)
        elif what == "job":
            self.jobs += 1
            self.notebook.of_job(self.jobs).create(a_job(), {})
            self.notebook.give_job(self.jobs, [0, 1])
        elif what == "look at rank":
            self.room = size
            self.look(which)
        elif what == "look at notebook":
            self.room = size
            self.give(self.side.news())
        self.check()

    def look(self, rank):
        if self.side.error is None:  # else it is not asked
            self.give(self.side.take(self.sides[rank].news()), but=rank)
        else:
            self.give(self.side.take([]))

    def give(self, pieces, but=None):
        for rank, side in enumerate(self.sides):
            if rank != but and pieces:
                side.take(pieces)

    def check(self):
        """A record that the notebook sees comes after the large values of which it speaks."""
        for records in self.notebook.path.glob("**/*.records"):
            *lines, _ = records.read_bytes().split(b"\n")
            for line in lines:
                if b".blob " in line:
                    name, size = line.split()
                    assert (records.parent / name.decode()).stat().st_size == int(size)

    def settle(self):
        self.room = math.inf
        for _ in range(400):
            before = self.state()
            self.give(self.side.take([]))
            self.give(self.side.news())
            for rank in (0, 1):
                self.look(rank)
            if self.state() == before and self.side.error is None:
                return
        raise AssertionError("it never comes to rest")

    def state(self):
        return [sorted((str(path), path.stat().st_size) for path in there.path.rglob("*")) for there in (
            self.notebook, *self.ranks
        )]  # fmt: skip


def written(there, of=None):
    """What lies in a directory, but for what is made aside; perhaps only of one rank."""
    return {
        str(path.relative_to(there.path)): path.read_bytes()
        for path in there.path.rglob("*")
        if path.is_file() and path.parent.name == "ranks" and not path.name.startswith(".")
        if of is None or path.name.startswith(f"{of}.")
    }


@MANY
@given(steps=steps)
def test_directories_become_equal_whatever_is_written_and_looked_at_in_whatever_order(folder, steps):
    with pytest.MonkeyPatch.context() as patch:
        cluster = Cluster(folder(), patch)
        for step in steps:
            cluster.do(*step)
        cluster.settle()
        newest = {f"jobs/{number}/" for number in (cluster.jobs - 1, cluster.jobs)}
        for rank, there in enumerate(cluster.ranks):
            mine, seen = written(there), written(cluster.notebook, rank)
            late = [name for name in mine if name.startswith("jobs/") and not name.startswith(tuple(newest))]
            for name in {*mine, *seen} - set(late):
                if name.startswith(("ranks/", *newest)):
                    assert seen.get(name) == mine.get(name), name
            assert there.asked.read_bytes() == cluster.notebook.asked.read_bytes()
        published = {path.name: path.read_bytes() for path in cluster.notebook.path.glob("rendezvous.*")}
        for there in cluster.ranks:
            assert {path.name: path.read_bytes() for path in there.path.glob("rendezvous.*")} == published


def test_the_sender_writes_what_the_reader_knows(tmp_path):
    """So that what is cut and mixed above is what ranks write."""
    sender = FileSender(tmp_path / "1.0.records")
    sender.send(events.Expect(1, 7))
    sender.close()
    assert (tmp_path / "1.0.records").read_bytes() == line_of(events.Expect(1, 7))
