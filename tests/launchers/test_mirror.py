"""Two run directories that are kept equal, and where ranks can be placed: labkit.launchers.ray without Ray."""

from __future__ import annotations

import errno
import os
import sys
import time
import types
from threading import Event
from types import SimpleNamespace

import pytest

from labkit.launchers.ray import driver, mirror, rank_holder
from labkit.launchers.ray.mirror import NotebookSide, Piece, RankSide
from labkit.launchers.ray.orders import Orders
from labkit.launchers.ray.placement import Place, asked_for, can_be_placed, places, there_is
from labkit.launchers.run_directory import files
from labkit.launchers.run_directory.directory import RunDirectory
from labkit.launchers.run_directory.sender import FileSender
from labkit.protocol import events
from tests.support.fake_engine import a_job
from tests.support.session_files import SessionDirectory


@pytest.fixture
def notebook(tmp_path):
    made = RunDirectory(tmp_path / "notebook")
    made.create(a_job(), {"launcher": "Ray"})
    return made


@pytest.fixture
def session(tmp_path):
    made = SessionDirectory(tmp_path / "notebook")
    made.create_for_jobs({"launcher": "Ray"})
    return made


def begin(directory, node, rank=1):
    """The two sides of one rank, with the rank's directory at `node`."""
    side = NotebookSide(directory.path)
    side.begin()
    return side, RankSide(node, side.for_rank(rank))


def test_a_record_comes_after_all_that_was_printed_before_and_no_piece_is_large(notebook, tmp_path, monkeypatch):
    monkeypatch.setattr(mirror, "BLOCK_BYTES", 10)
    node = tmp_path / "node"
    side, rank = begin(notebook, node)
    (node / "ranks" / "1.0.records").touch()
    side.take(rank.news())
    (node / "ranks" / "1.0.out").write_bytes(b"x" * 35)
    (node / "ranks" / "1.0.records").write_bytes(b"[]\n")
    for printed, reported in ((10, 0), (20, 0), (30, 0), (35, 3)):
        pieces = rank.news()
        assert all(len(piece.data) <= 10 for piece in pieces)
        side.take(pieces)
        assert notebook.file(1, 0, "out").stat().st_size == printed
        assert notebook.file(1, 0, "records").stat().st_size == reported


def test_words_come_whole_in_order_and_after_the_job_that_they_speak_of(session, tmp_path):
    node = tmp_path / "node"
    side, rank = begin(session, node)
    with open(session.asked, "a") as asked:
        asked.write("sto")
    assert side.news() == []
    with open(session.asked, "a") as asked:
        asked.write("p\n")
    session.of_job(1).create(a_job(), {"launcher": "session"})
    session.give_job(1, [0, 1])
    pieces = side.news()
    assert [piece.name for piece in pieces] == ["jobs/1/run.json", "jobs/1/job.pkl", "jobs/1/asked", "asked"]
    rank.take(pieces)
    assert (node / "asked").read_text() == "stop\njob:1:0,1\n"
    assert RunDirectory(node / "jobs" / "1").job().world_size == 2
    (node / "jobs" / "1" / "ranks" / "1.0.records").write_bytes(b"[]\n")
    side.take(rank.news())
    assert session.of_job(1).file(1, 0, "records").read_bytes() == b"[]\n"


def test_a_rank_that_begins_again_sees_which_numbers_are_taken_and_the_newest_job(session, tmp_path):
    session.file(1, 0, "records").write_bytes(b"x" * 5000 + b'\n["Exit", 1, -9]\n')
    session.file(0, 0, "records").write_bytes(b"another's\n")
    for number in (1, 2):
        session.of_job(number).create(a_job(), {"launcher": "session"})
        session.of_job(number).file(1, 0, "records").write_bytes(b"[]\n")
        session.give_job(number, [1])
    node = tmp_path / "node"
    side, rank = begin(session, node)
    assert (node / "ranks" / "1.0.records").read_bytes().endswith(b'\n["Exit", 1, -9]\n')
    assert (node / "ranks" / "1.0.records").stat().st_size == mirror.END_BYTES
    assert not (node / "ranks" / "0.0.records").exists()
    assert not (node / "jobs" / "1" / "job.pkl").exists(), "that is long over"
    assert (node / "jobs" / "2" / "job.pkl").exists()
    assert (node / "asked").read_bytes() == session.asked.read_bytes()
    assert rank.news() == []
    with open(node / "jobs" / "2" / "ranks" / "1.0.records", "a") as records:
        records.write("more\n")
    side.take(rank.news())
    assert session.of_job(2).file(1, 0, "records").read_bytes() == b"[]\nmore\n"


def test_that_a_session_is_idle_comes_from_a_rank_and_goes_to_all(session, tmp_path):
    side, rank = begin(session, tmp_path / "node", 0)
    with open(tmp_path / "node" / "asked", "a") as asked:
        asked.write("idle\n")
    side.take(rank.news())
    assert session.was_asked_to("idle")
    rank.take(side.news())
    assert rank.news() == []


@pytest.mark.parametrize(
    "piece",
    [Piece("../outside", b""), Piece("job.pkl", b""), Piece("asked", b"end\n", False), Piece("ranks/0.0.records", b"")],
)
def test_what_no_rank_writes_is_not_taken(piece, notebook):
    with pytest.raises(ValueError, match="which no rank writes"):
        NotebookSide(notebook.path).take([piece])


# What is large, and disks that are full


def test_of_jobs_that_are_over_large_values_stay_with_the_notebook_only(session, tmp_path):
    side, rank = begin(session, tmp_path / "node")
    for number in range(1, 5):
        session.of_job(number).create(a_job(), {"launcher": "session"})
        session.give_job(number, [0, 1])
        rank.take(side.news())
        sender = FileSender(tmp_path / "node" / "jobs" / str(number) / "ranks" / "1.0.records")
        sender.send(events.Result(1, bytes(100_000)))
        sender.close()
        while pieces := rank.news():
            side.take(pieces)
    blobs = [sorted(path.parts[-3] for path in there.rglob("*.blob")) for there in (session.path, tmp_path / "node")]
    assert blobs == [["1", "2", "3", "4"], ["3", "4"]]


def test_a_node_without_room_for_the_job_says_so(notebook, tmp_path, monkeypatch):
    def full(descriptor, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left on device"):
        begin(notebook, tmp_path / "node")


# What a node keeps


@pytest.fixture
def holder(monkeypatch, tmp_path):
    """The module of the actors, which finds no Ray, and keeps its directories here."""
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setitem(sys.modules, "ray._private.worker", None)
    monkeypatch.setattr(rank_holder.tempfile, "gettempdir", lambda: str(tmp_path))
    return rank_holder


def test_a_node_learns_how_far_its_clock_is_ahead_by_the_quickest_question(holder, tmp_path):
    actor = object.__new__(holder.RankHolder)
    actor._directory, actor._clock_ahead_s = tmp_path, float("inf")
    for delay_s in (40.0, 0.0, 20.0):
        actor._compare_clocks(time.time() - 3600 - delay_s)
    (tmp_path / "file").touch()
    assert files.clock_off_s(tmp_path, tmp_path / "file") == pytest.approx(3600, abs=2)


# Nodes that Ray takes away


class FakeRay(types.ModuleType):
    """As much of Ray as is asked while a placement waits."""

    def __init__(self, monkeypatch, state, looks):
        super().__init__("ray")
        self.__version__ = "2.99"
        self.asked = 0
        private = types.ModuleType("ray._private.state")
        private.state = state
        for name, module in {"ray": self, "ray._private": types.ModuleType("p"), "ray._private.state": private}.items():
            monkeypatch.setitem(sys.modules, name, module)
        answers = iter([False] * looks + [True])
        group = SimpleNamespace(wait=lambda seconds: next(answers))
        self.util = SimpleNamespace(
            client=SimpleNamespace(ray=SimpleNamespace(is_connected=lambda: False)),
            placement_group=lambda *_, **__: group,
            placement_group_table=lambda group: {"bundles_to_node_id": {}},
        )

    def nodes(self):
        return [{"Alive": True, "NodeID": str(number), "Resources": {"CPU": 1.0}} for number in range(50)]

    def available_resources(self):
        return {}


@pytest.fixture
def told(monkeypatch):
    """What the notebook is told by the process that speaks with Ray."""
    heard = []
    monkeypatch.setattr(driver.Notebook, "__init__", lambda self: vars(self).update(_warned=set(), wants_end=Event()))
    monkeypatch.setattr(driver.Notebook, "say", lambda self, event: heard.append(event))
    return heard


ORDERS = Orders("auto", 60, {"CPU": 1.0}, "PACK", 0, 60.0, 30.0, {})


def test_which_nodes_are_taken_away_is_asked_once_a_look_however_many_there_are(monkeypatch, told):
    asked = []
    state = SimpleNamespace(get_draining_nodes=lambda: asked.append(1) or {})
    FakeRay(monkeypatch, state, looks=3)
    driver.place(ORDERS, driver.Notebook(), "")
    assert len(asked) == 3


def test_a_ray_that_does_not_say_which_nodes_are_taken_away_is_named_once(monkeypatch, told):
    FakeRay(monkeypatch, SimpleNamespace(), looks=3)
    driver.place(ORDERS, driver.Notebook(), "")
    (warned,) = [event.text for event in told if isinstance(event, events.Warned)]
    assert warned.startswith("this version of Ray (2.99) does not say which nodes are taken away (ray._private.")
    assert "state.get_draining_nodes: AttributeError" in warned


# Where ranks can be placed


def test_ranks_of_a_node_follow_each_other():
    assert places({0: "b", 1: "a", 2: "b"}) == [
        Place(0, "b", 0, 0, 2),
        Place(2, "b", 1, 1, 2),
        Place(1, "a", 2, 0, 1),
    ]


@pytest.mark.parametrize(
    ("strategy", "world_size", "fits"),
    [("PACK", 5, True), ("PACK", 6, False), ("SPREAD", 5, True)]
    + [("STRICT_PACK", 3, True), ("STRICT_PACK", 4, False), ("STRICT_SPREAD", 2, True), ("STRICT_SPREAD", 3, False)],
)
def test_what_can_be_placed_is_known_beforehand(strategy, world_size, fits):
    nodes = [{"CPU": 8, "GPU": 3}, {"CPU": 2, "GPU": 4}, {"CPU": 64}]
    assert can_be_placed(nodes, {"CPU": 1, "GPU": 1}, world_size, strategy) is fits


def test_what_is_asked_for_and_what_there_is_is_said_in_words():
    assert asked_for({"CPU": 1, "GPU": 0.5}, 4, "STRICT_PACK") == (
        "4 ranks, each with 1 CPU and 0.5 GPU, all on one node"
    )
    assert asked_for({"CPU": 2}, 1, "PACK") == "1 rank with 2 CPU"
    assert (
        there_is([{"CPU": 8, "GPU": 4}, {"CPU": 8, "memory": 1}], {"CPU": 1, "GPU": 1}) == "16 CPU and 4 GPU on 2 nodes"
    )
