"""The store through which ranks meet is opened and joined without a question to a name server."""

from __future__ import annotations

import ctypes
import os
import threading

import pytest
import torch.distributed as dist

from labkit.engines.local import LocalEngine
from labkit.plugins.name_service import lookup, stores
from labkit.plugins.name_service.hooks import ByAddress
from labkit.protocol.job import Job, RankInfo
from labkit.rank import main, store


@pytest.fixture
def asked(monkeypatch):
    """What glibc was told, in order."""
    told = []
    monkeypatch.setattr(lookup, "_switch", lambda: (lambda database, sources: told.append(sources) or 0, b"files dns"))
    return told


def test_ranks_meet_through_it():
    opened, port = stores.open_store(2)
    joined = stores.join_store("127.0.0.1", port, 2)
    opened.set("greeting", "hello")
    assert joined.get("greeting") == b"hello"
    assert joined.port == port


def test_addresses_are_looked_up_in_files_alone_while_a_connection_is_made(asked):
    _, port = stores.open_store(2)
    assert asked == [b"files", b"files dns"]
    stores.join_store("127.0.0.1", port, 2)
    assert asked == [b"files", b"files dns"] * 2


def test_so_does_a_job_in_the_notebook_and_in_a_rank(asked, monkeypatch):
    class NoProcesses(LocalEngine):
        def _take(self):
            raise OSError("no process")

    _, port = store.open_store(1)
    assert asked == [], "by itself it does not"
    job = Job(b"", 1, "gloo", 0, 1, 0, port, 0.0, {}, {}).with_hooks(ByAddress())
    monkeypatch.setattr(os, "environ", {})
    main._rendezvous_in_the_notebook(job, RankInfo(0, 0, 1, 1))
    assert asked == [b"files", b"files dns"]
    with pytest.raises(OSError, match="no process"):
        NoProcesses(1).start(job)
    assert asked == [b"files", b"files dns"] * 2


def test_a_name_is_looked_up_as_ever(asked):
    _, port = stores.open_store(2)
    asked.clear()
    stores.join_store("localhost", port, 2)
    assert asked == []


def test_the_usual_way_is_back_if_nobody_answers(asked):
    with pytest.raises(dist.DistError):
        stores.join_store("127.0.0.1", 1, 2, timeout_s=0.2)
    assert asked == [b"files", b"files dns"]


def test_the_usual_way_is_back_only_after_the_last_of_several(asked):
    inside, leave = threading.Barrier(3), threading.Event()

    def connect():
        with lookup.without_name_service("127.0.0.1"):
            inside.wait()
            leave.wait()

    threads = [threading.Thread(target=connect) for _ in range(2)]
    for thread in threads:
        thread.start()
    inside.wait()
    assert asked == [b"files"]
    leave.set()
    for thread in threads:
        thread.join()
    assert asked == [b"files", b"files dns"]


def test_where_the_c_library_is_another_one_nothing_is_changed(monkeypatch):
    class Other:
        def __init__(self, name):
            pass

    lookup._switch.cache_clear()
    monkeypatch.setattr(ctypes, "CDLL", Other)
    try:
        assert lookup._switch() is None
        _, port = stores.open_store(1)
        assert stores.join_store("127.0.0.1", port, 1).num_keys() >= 0
    finally:
        lookup._switch.cache_clear()
