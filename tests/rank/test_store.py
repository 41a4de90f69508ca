"""The stores through which ranks meet: a file that is one user's alone, or a port where there are several machines."""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from datetime import timedelta

import pytest
import torch.distributed as dist

from labkit.engines.rendezvous import LOCK, PREFIX, LocalRendezvous, remove_left_behind
from labkit.rank import file_store, ports
from labkit.rank.file_store import LocalFileStore
from tests.conftest import LONG_S


@pytest.fixture
def rendezvous():
    made = LocalRendezvous()
    yield made
    made.close()


# Ranks of one machine


@pytest.mark.parametrize("mask", [0o000, 0o077])
def test_where_ranks_meet_is_one_users_alone_whatever_the_umask(mask):
    before = os.umask(mask)
    try:
        made = LocalRendezvous()
        LocalFileStore(str(made.file))
    finally:
        os.umask(before)
    assert made.folder.stat().st_mode & 0o777 == 0o700
    made.close()
    made.close()
    assert not made.folder.exists()


def test_two_processes_find_what_the_other_has_set(rendezvous):
    one, other = (LocalFileStore(str(rendezvous.file)) for _ in range(2))
    one.set("greeting", "hello")
    assert other.get("greeting") == b"hello"
    assert (one.add("count", 1), other.add("count", 2), one.add("count", 0)) == (1, 3, 3)
    assert other.check(["greeting"])
    assert not other.check(["greeting", "farewell"])
    assert other.compare_set("greeting", "hello", "good day") == b"good day" == one.get("greeting")
    below = dist.PrefixStore("below", one)
    below.set("greeting", "there")
    assert other.get("below/greeting") == b"there" == below.multi_get(["greeting"])[0]
    assert one.delete_key("greeting")
    assert not other.check(["greeting"])


def test_what_does_not_come_is_named(rendezvous):
    store = LocalFileStore(str(rendezvous.file), timeout_s=0.05)
    store.set("here", "")
    for wait in (
        lambda: store.get("nowhere"),
        lambda: store.wait(["here", "nowhere"], timedelta(seconds=0.05)),
        lambda: dist.PrefixStore("", store).get("nowhere"),
    ):
        with pytest.raises(dist.DistStoreError, match=r"not there after 0\.05 s: /?nowhere"):
            wait()


def test_a_store_whose_run_is_over_says_so_at_once(rendezvous):
    store, native = LocalFileStore(str(rendezvous.file)), LocalFileStore(str(rendezvous.file)).in_native_code
    rendezvous.close()
    for ask in (lambda: store.get("key"), lambda: store.add("key", 1), lambda: LocalFileStore(str(rendezvous.file))):
        with pytest.raises(dist.DistStoreError, match="is gone, as when their run is over"):
            ask()
    assert type(native) is dist.FileStore


@pytest.mark.spawns
def test_a_fork_that_ends_does_not_take_it_away(rendezvous):
    process = multiprocessing.get_context("fork").Process(target=rendezvous.close)
    process.start()
    process.join(LONG_S)
    assert process.exitcode == 0
    assert rendezvous.folder.exists()


# A script's own way to the store


def test_what_a_killed_process_has_left_is_removed_by_the_next(rendezvous, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    elsewhere = tmp_path / "mine"
    for folder in (tmp_path / f"{PREFIX}left", tmp_path / f"{PREFIX}begun", elsewhere):
        folder.mkdir()
    (tmp_path / f"{PREFIX}left" / LOCK).touch()
    (elsewhere / LOCK).touch()
    (tmp_path / f"{PREFIX}link").symlink_to(elsewhere)
    remove_left_behind.cache_clear()
    held = LocalRendezvous()
    remove_left_behind.cache_clear()
    remove_left_behind()
    there = {path.name.removeprefix(PREFIX) for path in tmp_path.iterdir()} - {"mine"}
    assert there == {"begun", "link", held.folder.name.removeprefix(PREFIX)}
    assert (elsewhere / LOCK).exists()
    held.close()


@pytest.fixture
def master(monkeypatch, rendezvous):
    """The store that stands at `MASTER_ADDR:MASTER_PORT`."""
    module = sys.modules["torch.distributed.rendezvous"]
    monkeypatch.setattr(module, "_create_c10d_store", module._create_c10d_store)
    for name in ("_create_store", "_master"):
        monkeypatch.setattr(file_store, name, None)
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": rendezvous.port}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    store = LocalFileStore(str(rendezvous.file))
    file_store.serve_master_port(store)
    return store


def test_whoever_meets_at_env_or_at_its_address_finds_the_ranks_own_store(master, rendezvous):
    for url in ("env://", f"tcp://127.0.0.1:{rendezvous.port}?rank=0&world_size=1"):
        store, rank, world_size = next(dist.rendezvous(url))
        assert (store, rank, world_size) == (master, 0, 1)


# Ranks of several machines


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.2", "::1"])
def test_a_store_listens_at_the_one_address_that_is_needed(address):
    try:
        with ports.listen(address) as listener:
            assert listener.getsockname()[0] == address
    except OSError:
        assert address == "::1"
        pytest.skip("this machine has no IPv6")
