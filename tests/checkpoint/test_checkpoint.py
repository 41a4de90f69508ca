"""Checkpoints: resumed bit for bit, whole or not there at all, and clear when something is wrong."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pickle
import random
import re
import resource
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import labkit
from labkit import checkpoint as room
from labkit.checkpoint import CheckpointError, checkpoints, load
from tests.support import resumable

SESSION_RANKS = 3


def checkpoint_of(folder, keep=3):
    """As one process has it, without a process group."""
    model = resumable.network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return labkit.Checkpoint(folder, keep=keep, model=model, optimizer=optimizer, notes={"saved": 0})


def save_three(folder, keep=3):
    """Save at steps 4, 6 and 8."""
    checkpoint = checkpoint_of(folder, keep)
    for checkpoint.step in (4, 6, 8):
        checkpoint.epoch += 1
        checkpoint.save(loss=1.5)


@pytest.fixture
def three(tmp_path):
    """A folder with three checkpoints."""
    save_three(tmp_path / "runs")
    return tmp_path / "runs"


# Going on


def test_there_is_nothing_to_resume_at_first_and_the_values_come_back_later(tmp_path):
    assert checkpoint_of(tmp_path).resume() == {}
    checkpoint_of(tmp_path).save(accuracy=0.1 + 0.2, curve=[1, 2.5], note="é")
    found = checkpoint_of(tmp_path).resume()
    assert found == {"epoch": 0, "step": 0, "accuracy": 0.1 + 0.2, "curve": [1, 2.5], "note": "é"}


def test_a_dict_is_saved_as_an_object_too(tmp_path):
    labkit.Checkpoint(tmp_path, mine={"curve": [0.5, torch.ones(2)], 3: "a key"}).save()
    again = {}
    labkit.Checkpoint(tmp_path, mine=again).resume()
    assert str(again) == str({"curve": [0.5, torch.ones(2)], 3: "a key"})


def test_the_last_k_are_kept_and_listed(tmp_path):
    save_three(tmp_path, keep=2)
    found = checkpoints(tmp_path)
    assert [(s.epoch, s.step, s.world_size, s.damage) for s in found] == [(2, 6, 1, ""), (3, 8, 1, "")]
    assert found[0].values["loss"] == 1.5
    assert found[0].bytes > 10_000
    assert sorted(path.name for path in tmp_path.iterdir()) == [s.path.name for s in found]


# Reading


@pytest.mark.parametrize("wrap", [nn.DataParallel, lambda model: torch.compile(nn.DataParallel(model))])
def test_keys_are_clean_and_a_bare_model_loads(wrap, tmp_path):
    path = labkit.Checkpoint(tmp_path, model=wrap(resumable.network(1))).save()
    state = load(tmp_path)["model"]
    assert set(state) == set(resumable.network().state_dict())
    bare = resumable.network(2)
    bare.load_state_dict(state)
    plain = torch.load(path / "rank-0.pt", weights_only=True)["state"]["model"]  # without labkit
    expected = resumable.fingerprint(resumable.network(1).state_dict())
    assert resumable.fingerprint(bare.state_dict()) == resumable.fingerprint(plain) == expected
    assert state._metadata == plain._metadata == resumable.network().state_dict()._metadata, "versions of its modules"


def cut(path):
    path.write_bytes(path.read_bytes()[:1000])


DAMAGE = {
    "truncated": ("rank-0.pt", cut, r"rank-0\.pt has 1,000 bytes of the [\d,]+ that were written"),
    "a file is missing": ("rank-0.pt", Path.unlink, r"rank-0\.pt has 0 bytes of the [\d,]+ that were written"),
    "no description": ("about.json", Path.unlink, r"is damaged, or no checkpoint: its about\.json cannot be read"),
    "half a description": (
        "about.json",
        lambda p: p.write_bytes(p.read_bytes()[:90]),
        r"is damaged, or no checkpoint: its about\.json",
    ),
    "something else": ("about.json", lambda p: p.write_text("[1]"), r"is damaged, or no checkpoint: its about\.json"),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_checkpoint_is_refused_and_the_newest_good_one_offered(how, three):
    name, harm, said = DAMAGE[how]
    newest = checkpoints(three)[-1].path
    harm(newest / name)
    with pytest.raises(CheckpointError, match=rf"{said}.*\. The newest that is whole is .*checkpoint-000002"):
        load(newest)
    assert re.search(said, checkpoints(three)[-1].damage)
    again = checkpoint_of(three)
    with pytest.warns(UserWarning, match=rf"{said}.*Going on from .*checkpoint-000002 instead"):
        assert again.resume()["step"] == 6
    with pytest.warns(UserWarning, match=rf"{said}.*This is .*checkpoint-000002 instead"):
        assert load(three)["notes"] == {"saved": 0}
    assert again.save().name == "checkpoint-000004"
    assert checkpoint_of(three).resume()["step"] == 6


def test_it_does_not_begin_anew_when_no_checkpoint_is_whole(three):
    for saved in checkpoints(three):
        cut(saved.path / "rank-0.pt")
    checkpoint = checkpoint_of(three)
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is whole: .*; .*; .*Move them away to begin anew"):
        checkpoint.resume()
    with pytest.raises(CheckpointError, match=r"has 1,000 bytes .*\. No checkpoint in .* is whole"):
        load(three / "checkpoint-000001")


class Evil:
    def __reduce__(self):
        return os.mkdir, ("executed",)


def test_no_code_is_run_from_a_file(three, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    path = checkpoints(three)[-1].path
    torch.save({"state": Evil()}, path / "rank-0.pt")
    about = json.loads((path / "about.json").read_text())
    about["sizes"]["rank-0.pt"] = (path / "rank-0.pt").stat().st_size
    (path / "about.json").write_text(json.dumps(about))
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        load(path)
    assert not (tmp_path / "executed").exists()


def test_other_objects_than_were_saved_are_refused(three):
    checkpoint = labkit.Checkpoint(three, model=resumable.network())
    with pytest.raises(CheckpointError, match="it holds model, optimizer, notes, but this Checkpoint has model"):
        checkpoint.resume()
    other = labkit.Checkpoint(three, model=nn.Linear(1, 1), optimizer=nn.Linear(1, 1), notes={})
    with pytest.raises(CheckpointError, match=r"(?s)rank 0 could not resume from .*Missing key"):
        other.resume()


# Writing


def no_space(*args, **kwargs):
    raise OSError(errno.ENOSPC, "No space left on device")


@contextlib.contextmanager
def largest_file(size):
    """Let the system write no file larger than that."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("breaks", ["write", "fsync", "rename", "mkdir"])
def test_a_full_disk_is_said_and_costs_nothing_that_was_saved(breaks, three, monkeypatch):
    before = set(three.rglob("*"))
    checkpoint = checkpoint_of(three)
    checkpoint.resume()
    if breaks != "write":
        monkeypatch.setattr(os if breaks == "fsync" else Path, breaks, no_space)
    said = "File too large" if breaks == "write" else "No space left"
    with (
        largest_file(10_000 if breaks == "write" else resource.RLIM_INFINITY),
        pytest.raises(CheckpointError, match=rf"rank 0 could not (write|prepare) a checkpoint.*OSError: .*{said}"),
    ):
        checkpoint.save()
    monkeypatch.undo()
    assert set(three.rglob("*")) == before
    assert [saved.damage for saved in checkpoints(three)] == [""] * 3
    assert checkpoint.save().name == "checkpoint-000004"


def test_what_a_killed_run_left_is_removed_by_the_next_save_and_nothing_else(tmp_path):
    others = {".mine", "checkpoint-old", "notes"}
    for name in (*others, ".checkpoint-000007.writing", ".checkpoint-000003"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    checkpoint = checkpoint_of(tmp_path)
    assert checkpoint.resume() == {}
    assert (tmp_path / ".checkpoint-000007.writing").exists(), "another run may be writing it"
    assert checkpoint.save().name == "checkpoint-000001"
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-000001", *others}


UNREADABLE = r"mine holds something that torch\.load\(weights_only"
ODD = r"mine\.best\.0 is no dense tensor of an ordinary type"


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (print, UNREADABLE),
        (torch.rand(2).numpy()[0], UNREADABLE),
        (Path(), UNREADABLE),
        (torch.eye(2).to_sparse(), ODD),
        (torch.tensor([1 + 2j]).conj(), ODD),
    ],
)
def test_what_could_not_be_read_back_is_refused_by_name_when_saving(value, said, tmp_path):
    checkpoint = labkit.Checkpoint(tmp_path, mine={"best": [value]})
    with pytest.raises(CheckpointError, match=f"rank 0 could not prepare a checkpoint: TypeError: {said}"):
        checkpoint.save()
    assert list(tmp_path.iterdir()) == []


def test_arguments_of_no_use_are_refused(tmp_path):
    with pytest.raises(ValueError, match="keep is how many checkpoints to keep, at least 1; got 0"):
        labkit.Checkpoint(tmp_path, keep=0, model=nn.Linear(1, 1))
    with pytest.raises(ValueError, match="needs something to save"):
        labkit.Checkpoint(tmp_path)
    with pytest.raises(TypeError, match=r"epoch is a int, which has no state_dict\(\)"):
        labkit.Checkpoint(tmp_path, epoch=3)
    checkpoint = labkit.Checkpoint(tmp_path, model=nn.Linear(1, 1))
    with pytest.raises(ValueError, match=r"the checkpoint counts epoch and step itself"):
        checkpoint.save(epoch=3)
    for value in (torch.ones(1), {(1, 2): 3}, {1: 2}, [0, {"w": torch.ones(1)}]):
        with pytest.raises(CheckpointError, match=r"save\(best=…\): a value is plain numbers, texts"):
            checkpoint.save(best=value)
    assert list(tmp_path.iterdir()) == []


# With ranks


def launch(function, *args, on, world_size=2, **kwargs):
    return labkit.launch(function, *args, world_size=world_size, on=on, live=False, **kwargs).results


@pytest.mark.spawns
def test_killed_at_any_moment_it_resumes_bit_identically(tmp_path, ranks):
    world_size = 2  # from three on, sums depend on how DDP has divided its buckets
    expected = launch(resumable.train, tmp_path / "whole", world_size=world_size, on=ranks)
    folder = tmp_path / "killed"
    dice = random.Random(1)
    for rank, operations in ((0, 100), (1, 20)):  # in the middle of writing
        assert resumable.kill(folder, world_size, on=ranks, die=(rank, dice.randrange(operations // 2, operations)))
    assert resumable.kill(folder, world_size, on=ranks, stay_after=2)
    results = launch(resumable.train, folder, world_size=world_size, on=ranks)
    assert [fingerprint for fingerprint, _ in results] == [fingerprint for fingerprint, _ in expected]
    for (_, losses), (_, all_losses) in zip(results, expected, strict=True):
        assert 0 < len(losses) < len(all_losses)
        assert losses == all_losses[-len(losses) :]
    assert all(not saved.damage for saved in checkpoints(folder))
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]


def save_with_a_full_rank(worker, folder):
    checkpoint = labkit.Checkpoint(folder, model=nn.Linear(2, 2))
    checkpoint.save()
    write = room._write_tensors
    if worker.rank == 1:
        room._write_tensors = no_space
    try:
        checkpoint.save()
    finally:
        room._write_tensors = write


@pytest.mark.spawns
def test_a_rank_that_cannot_write_is_named_and_no_other_waits_for_it(tmp_path, ranks):
    said = "rank 1 failed: .*rank 1 could not write a checkpoint in .*No space left on device"
    with pytest.raises(labkit.WorkerFailed, match=said):
        launch(save_with_a_full_rank, tmp_path, on=ranks)
    assert [saved.damage for saved in checkpoints(tmp_path)] == [""]
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-000001"]


def take_steps(model, optimizer, batch, steps):
    for _ in range(steps):
        model(batch).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def shard_and_step(worker, folder, kind, steps):
    """Resume, take some steps on the same batch on every rank, save; give the whole weights before and after."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)).double()
    batch = torch.randn(4, 6, dtype=torch.float64)
    if kind == "FSDP2":
        for layer in (model[0], model[2]):
            fully_shard(layer)
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    else:  # a part of its own on every rank
        with torch.no_grad():
            model[0].weight += worker.rank
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    checkpoint = labkit.Checkpoint(folder, model=model, optimizer=optimizer)
    checkpoint.resume()
    take_steps(model, optimizer, batch, steps)
    checkpoint.step += steps
    checkpoint.save()
    weights = getattr(model, "module", model).state_dict()
    whole = {name: (w.full_tensor() if hasattr(w, "full_tensor") else w).clone() for name, w in weights.items()}
    dist.barrier()
    return whole


@pytest.mark.spawns
@pytest.mark.parametrize("kind", ["FSDP2", "a part each"])
def test_what_is_cut_over_ranks_resumes(kind, tmp_path, ranks):
    def step(folder, world_size, steps):
        return launch(shard_and_step, tmp_path / folder, kind, steps, world_size=world_size, on=ranks)

    expected = resumable.fingerprint(*step("whole", 2, 4))
    first = step("parts", 2, 3)
    same = [load(tmp_path / "parts", rank=rank)["model"] for rank in range(2)]
    assert resumable.fingerprint(*same) == resumable.fingerprint(*first)
    assert resumable.fingerprint(*step("parts", 2, 1)) == expected
    if kind == "a part each":
        assert resumable.fingerprint(same[0]) != resumable.fingerprint(same[1])
        said = "ranks held different parts of model, optimizer, so it takes 2 ranks to resume; there are 1"
        with pytest.raises(labkit.WorkerFailed, match=said):
            step("parts", 1, 1)
        return
    everything = resumable.fingerprint(load(tmp_path / "parts"))
    for world_size in (1, 3):  # however many ranks there are now, all is the same when put together
        step("parts", world_size, 0)
        assert checkpoints(tmp_path / "parts")[-1].world_size == world_size
        assert resumable.fingerprint(load(tmp_path / "parts")) == everything


def count_the_rest(worker, folder, stop_at=None):
    """Give the samples that this rank sees, from where the last run was."""
    sampler = DistributedSampler(range(48), seed=1)
    model = DistributedDataParallel(nn.BatchNorm1d(1))
    with torch.no_grad():
        model.module.running_mean += worker.rank
    checkpoint = labkit.Checkpoint(folder, model=model)
    checkpoint.resume()
    seen = []
    for batch in checkpoint.batches(DataLoader(range(48), 4, sampler=sampler)):
        seen += batch.tolist()
        if checkpoint.step == stop_at:
            checkpoint.save()
            break
    return seen, model.module.running_mean.item(), torch.rand(1).item()


@pytest.mark.spawns
def test_with_another_number_of_ranks_the_epoch_goes_on_with_the_samples_that_are_left(tmp_path, ranks):
    first = launch(count_the_rest, tmp_path, stop_at=3, on=ranks)
    run = labkit.launch(count_the_rest, tmp_path, on=ranks, live=False)
    assert sorted(s for seen, *_ in [*first, *run.results] for s in seen) == list(range(48))
    assert [mean for _, mean, _ in run.results] == [0, 0, 0]  # as on rank 0, which is what DDP broadcasts
    assert [dice for *_, dice in run.results][:2] == [dice for *_, dice in first]
    assert "was saved by 2 ranks and goes on with 3: weights and optimizer are the same" in " ".join(run.output)


# While training goes on, and on other meshes


class Slow:
    """Stands in for `torch.save`: writes nothing before it is let."""

    def __init__(self):
        self.is_free, self.save = threading.Event(), torch.save

    def __call__(self, *args, **kwargs):
        assert self.is_free.wait(60)
        self.save(*args, **kwargs)


def test_what_is_saved_meanwhile_is_the_state_at_the_call_and_errors_come_with_wait(tmp_path, monkeypatch):
    model = nn.Linear(2, 2)
    checkpoint = labkit.Checkpoint(tmp_path, model=model)
    slow = Slow()
    before = resumable.fingerprint(model.state_dict())
    check = room._check_readable
    monkeypatch.setattr(room, "_check_readable", lambda *of: (check(*of), monkeypatch.setattr(torch, "save", slow)))
    path = checkpoint.save(wait=False, note="first")
    with torch.no_grad():
        model.weight += 1
    assert checkpoints(tmp_path) == []
    slow.is_free.set()
    checkpoint.wait()
    assert [saved.path for saved in checkpoints(tmp_path)] == [path]
    assert resumable.fingerprint(load(tmp_path)["model"]) == before
    monkeypatch.undo()
    with largest_file(100):
        checkpoint.save(wait=False)
        with pytest.raises(CheckpointError, match=r"rank 0 could not write a checkpoint.*OSError: .*File too large"):
            checkpoint.wait()
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-000001"]


def save_meanwhile(worker, folder):
    """Save sharded weights in the second of four steps, while training goes on; return each step's weights, whole."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = fully_shard(nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    checkpoint = labkit.Checkpoint(folder, model=model, optimizer=optimizer)
    whole = []
    for checkpoint.step in range(1, 5):
        take_steps(model, optimizer, torch.ones(2, 8), 1)
        whole.append(model.weight.full_tensor().detach().clone())
        if checkpoint.step == 2:
            checkpoint.save(wait=False)
    checkpoint.wait()
    return whole


@pytest.mark.spawns
def test_sharded_weights_saved_meanwhile_are_those_of_the_call(tmp_path, ranks):
    whole = launch(save_meanwhile, tmp_path, on=ranks)[0]
    found = load(tmp_path)["model"]["weight"]
    assert [torch.equal(found, each) for each in whole] == [False, True, False, False]


def stages_of_their_own(worker, folder):
    """Two groups of ranks, each with another stage under the same name, sharded in its own group; and resumed."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(worker.device.type, (2, 1), mesh_dim_names=("stage", "shard"))

    def make(value):
        stage = nn.Linear(4, 4)
        nn.init.constant_(stage.weight, value)
        return fully_shard(stage, mesh=mesh["shard"])

    labkit.Checkpoint(folder, model=make(1.0 + worker.rank)).save()
    again = make(0.0)
    labkit.Checkpoint(folder, model=again).resume()
    return again.weight.full_tensor()[0, 0].item()


@pytest.mark.spawns
def test_stages_under_one_name_that_are_sharded_apart_do_not_overwrite_each_other(tmp_path, ranks):
    assert launch(stages_of_their_own, tmp_path, on=ranks) == [1.0, 2.0]
    assert [load(tmp_path, rank=rank)["model"]["weight"][0, 0].item() for rank in range(2)] == [1.0, 2.0]


@pytest.mark.spawns
def test_the_index_of_shards_that_another_user_has_written_is_not_unpickled(tmp_path, ranks, monkeypatch):
    launch(save_meanwhile, tmp_path, on=ranks)
    uid = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    with pytest.raises(CheckpointError, match=r"\.metadata is another user's, and is a pickle, which can run code"):
        load(tmp_path)
