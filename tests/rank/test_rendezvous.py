"""Where the ranks of a launcher meet: in a file if they are on one machine, else at a port of rank 0's."""

from __future__ import annotations

import json
import os
import sys
import threading

import pytest
import torch.distributed as dist

from labkit.launchers import rank_entry, tcp_store
from labkit.launchers.run_directory.directory import RunDirectory
from labkit.protocol.job import RankInfo
from labkit.rank import local_rendezvous, private_folder
from labkit.rank.local_rendezvous import LocalFileStore
from tests.conftest import LONG_S


@pytest.fixture
def directory(tmp_path):
    made = RunDirectory(tmp_path / "run")
    made.path.mkdir(mode=0o700)
    return made


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """A launcher's, without what is in ours; afterwards nothing is left of where the ranks have met."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("TORCHELASTIC", "SLURM", "LABKIT", "MASTER"))}
    kept["SLURM_PROCID"] = "0"
    monkeypatch.setattr(os, "environ", kept)
    module = sys.modules["torch.distributed.rendezvous"]
    monkeypatch.setattr(module, "_create_c10d_store", module._create_c10d_store)
    for name in ("_create_store", "_master"):
        monkeypatch.setattr(local_rendezvous, name, None)
    monkeypatch.setattr(rank_entry, "_mine", None)
    yield kept
    if rank_entry._mine is not None:
        rank_entry._mine.close()


def of_two(directory, local_world_size):
    """Both ranks' stores, which find each other."""
    stores = {}

    def meet(rank):
        info = RankInfo(rank, rank % local_world_size, 2, local_world_size)
        stores[rank] = rank_entry.rendezvous(info, directory, 0)

    threads = [threading.Thread(target=meet, args=(rank,)) for rank in (1, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
    stores[0].set("said", "there")
    assert stores[1].get("said") == b"there"
    return stores


def test_ranks_of_one_machine_meet_where_no_other_user_can_come(directory, environment):
    stores = of_two(directory, local_world_size=2)
    assert {type(store) for store in stores.values()} == {LocalFileStore}
    (published,) = directory.path.glob("rendezvous.*.json")
    found = json.loads(published.read_text())
    assert found == {"file": str(rank_entry._mine.file), "port": rank_entry._mine.port}
    assert (environment["MASTER_ADDR"], environment["MASTER_PORT"]) == ("127.0.0.1", str(found["port"]))
    assert "TORCHELASTIC_USE_AGENT_STORE" not in environment
    again, *_ = next(dist.rendezvous("env://", rank=0, world_size=2))
    assert again.get("said") == b"there"


def test_a_job_after_another_meets_elsewhere(directory, tmp_path):
    of_two(directory, local_world_size=2)
    before = rank_entry._mine.folder
    (tmp_path / "next").mkdir(mode=0o700)
    of_two(RunDirectory(tmp_path / "next"), local_world_size=2)
    assert not before.exists()
    assert rank_entry._mine.folder.exists()


def test_on_ray_they_meet_in_the_directory_that_their_actor_removes(directory, environment):
    environment |= {"LABKIT_RANK": "0", "LABKIT_RANK_FOLDER": str(directory.path)}
    of_two(directory, local_world_size=2)
    assert rank_entry._mine.folder.parent == directory.path


def test_each_attempt_is_published_under_a_name_of_its_own(environment):
    environment |= {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}
    assert rank_entry.published_name(1) == "rendezvous.7.0.1.json"


@pytest.mark.parametrize("left", ["its folder is gone", "its process is gone"])
def test_what_another_run_has_left_is_passed_over(directory, left, tmp_path, monkeypatch):
    monkeypatch.setattr(rank_entry, "RENDEZVOUS_S", 0.2)
    folder = tmp_path / "left"
    if left == "its process is gone":
        folder.mkdir(mode=0o700)
        (folder / private_folder.MARKER).touch()
    found = {"file": str(folder / "store"), "port": 1}
    directory.write(rank_entry.published_name(0), json.dumps(found).encode())
    why = "No such file" if left == "its folder is gone" else "is left of a run that is over"
    with pytest.raises(TimeoutError, match=f"rank 1 has waited 0.2 s for rank 0: .*{why}"):
        rank_entry.rendezvous(RankInfo(1, 1, 2, 2), directory, 0)


def test_ranks_of_several_machines_meet_at_the_one_address_that_is_needed(directory, environment):
    """As SLURM's launch node reaches them; who meets at env:// joins the store that rank 0 has opened."""
    environment["SLURM_LAUNCH_NODE_IPADDR"] = "127.0.0.1"
    stores = of_two(directory, local_world_size=1)
    assert {type(store) for store in stores.values()} == {dist.TCPStore}
    (published,) = directory.path.glob("rendezvous.*.json")
    assert json.loads(published.read_text())["addresses"] == ["127.0.0.1"]
    again, *_ = next(dist.rendezvous("env://", rank=1, world_size=2))
    assert again.get("said") == b"there"


def test_a_store_that_another_run_has_opened_there_is_passed_over(directory, monkeypatch):
    monkeypatch.setattr(rank_entry, "RENDEZVOUS_S", 0.2)
    keeper = [tcp_store.open_store(2)]
    keeper[0].set("labkit/token", "another")
    found = {"addresses": ["127.0.0.1"], "port": keeper[0].port, "token": "ours"}
    directory.write(rank_entry.published_name(0), json.dumps(found).encode())
    with pytest.raises(TimeoutError, match="another store answers"):
        rank_entry.rendezvous(RankInfo(1, 0, 2, 1), directory, 0)
    keeper.clear()  # which the traceback would keep
