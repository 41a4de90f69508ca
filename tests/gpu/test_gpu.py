"""labkit on a GPU: `make test-gpu`. Where there is none, `make test-wide` runs on the CPU what does not need one."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

import labkit
from labkit.rank.device import OWN_GPU
from tests.conftest import LONG_S, wait_for_step, wait_until
from tests.pretended_gpu import is_on
from tests.support import resumable

SESSION_RANKS = 4


GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.spawns, *([] if GPUS else [pytest.mark.wide])]
DEVICE = "cuda" if GPUS else "cpu"
MIB = 2**20
WIDTH = 2048 if GPUS else 64
"""Of what is trained: on a GPU its weights take 32 MiB, which are to be given back."""

SHARE = {"backend": "gloo", **({"device": "cuda"} if GPUS else {})}
"""How ranks are launched that share a GPU if they must."""

needs_gpu = pytest.mark.skipif(not GPUS, reason="found no GPU: this test is about one")
needs_real = pytest.mark.skipif(not GPUS or is_on(), reason="found no GPU: a pretended one has no kernels and no time")
needs_two = pytest.mark.skipif(GPUS < 2, reason=f"found {GPUS} GPUs: this test needs two")


def used_mib():
    """Return what all processes together hold on the first GPU; without one, nothing."""
    if not GPUS:
        return 0.0
    free, total = torch.cuda.mem_get_info(0)
    return (total - free) / MIB


def meet(worker):
    """Return the backend, the device, and the sum of ranks + 1, taken on the device."""
    number = torch.full((1024,), worker.rank + 1.0, device=worker.device)
    dist.all_reduce(number)
    return dist.get_backend(), str(worker.device), number[0].item()


def train(worker, steps=200, pause_s=0.0, fail_at=None, width=WIDTH):
    """Train something on the rank's device: a network of so many inputs, and twice as many outputs."""
    model = nn.parallel.DistributedDataParallel(nn.Linear(width, 2 * width).to(worker.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(steps):
        if fail_at == step and worker.rank == worker.world_size - 1:
            raise ValueError("planted")
        loss = model(torch.randn(64, width, device=worker.device)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        worker.log(step=step, loss=loss)
        time.sleep(pause_s)


# Devices and backends


@needs_gpu
def test_one_rank_uses_the_gpu_by_nccl():
    run = labkit.launch(meet, world_size=1, live=False)
    assert run.results == [(OWN_GPU, "cuda:0", 1.0)]


@needs_two
def test_two_gpus_by_nccl():
    run = labkit.launch(meet, world_size=2, live=False)
    assert run.results == [(OWN_GPU, "cuda:0", 3.0), (OWN_GPU, "cuda:1", 3.0)]


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_share_a_device_by_gloo_which_the_kernel_uses_too(ranks, world_size):
    assert torch.ones(1024, device=DEVICE).sum().item() == 1024
    run = labkit.launch(meet, on=ranks, world_size=world_size, **SHARE, live=False)
    assert [backend for backend, *_ in run.results] == ["gloo"] * world_size
    assert [total for *_, total in run.results] == [world_size * (world_size + 1) / 2] * world_size
    if GPUS == 1:
        assert {device for _, device, _ in run.results} == {"cuda:0"}
        assert run.placement == f"{world_size} ranks share cuda:0"
        by_itself = labkit.launch(meet, on=ranks, world_size=world_size, live=False)
        assert {device for _, device, _ in by_itself.results} == {"cpu"}


@needs_gpu
def test_a_kernel_that_fails_ends_its_rank_which_is_replaced():
    def out_of_range(worker):
        torch.nn.Embedding(4, 2).to(worker.device)(torch.tensor([5], device=worker.device)).sum().item()

    with labkit.Session(1) as ranks:
        run = labkit.launch(out_of_range, on=ranks, live=False, wait=False)
        assert run.over.wait(LONG_S)
        assert "device-side assert" in str(run.error)
        assert 'labkit.explain("device_side_assert")' in str(run.error)
        assert labkit.launch(meet, on=ranks, live=False).results == [(OWN_GPU, "cuda:0", 1.0)]


@needs_gpu
def test_ranks_on_the_cpu_and_standby_ranks_have_no_context():
    before = used_mib()
    with labkit.Session(4, device="cpu") as ranks:
        results = labkit.launch(meet, on=ranks, live=False).results
        assert {device for _, device, _ in results} == {"cpu"}
        assert used_mib() <= before + 1


# Memory


@pytest.mark.parametrize("ending", ["stop", "failure"])
def test_a_device_has_its_memory_back_after(ending):
    before = used_mib()
    options = {"fail_at": 20} if ending == "failure" else {"pause_s": 0.02}
    run = labkit.launch(train, world_size=2, **SHARE, live=False, wait=False, steps=10_000, **options)
    wait_for_step(run, 10)
    during = used_mib()
    if ending == "stop":
        run.stop()
    assert run.over.wait(LONG_S)
    assert (run.error is not None) == (ending == "failure")
    assert not GPUS or during > before + 64
    wait_until(lambda: used_mib() <= before + 1)


def allocate(worker, size):
    if worker.rank == 1:
        torch.empty(size, dtype=torch.uint8, device=worker.device)
    dist.barrier()


def test_out_of_memory_is_named_with_rank_and_bytes_and_the_ranks_compute_on(ranks):
    pids = list(ranks.pids)
    run = labkit.launch(allocate, on=ranks, world_size=2, **SHARE, size=2**46, live=False, wait=False)
    assert run.over.wait(LONG_S)
    assert run.error.rank == 1
    said = str(run.error)
    assert ("65536.00 GiB" if GPUS else str(2**46)) in said, said
    assert len(labkit.launch(meet, on=ranks, world_size=2, **SHARE, live=False).results) == 2
    assert ranks.pids == pids


# Numbers


def resume(worker, folder, die=None):
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    return resumable.train(worker, folder, epochs=2, die=die)


def test_a_run_that_was_killed_and_resumes_ends_bit_for_bit_as_one_that_was_not(tmp_path):
    def train(folder, die=None):
        options = {"world_size": 2, **SHARE, "live": False, "wait": False}
        run = labkit.launch(resume, tmp_path / folder, die, **options)
        assert run.over.wait(LONG_S)
        return run

    whole = train("whole").wait()
    killed = train("parts", die=(1, 12))
    assert killed.error.rank == 1
    steps = killed.progress(0)[0].last_step
    assert 0 < steps < max(whole.history["step"])
    hashes = [fingerprint for fingerprint, _ in train("parts").wait().results]
    assert hashes == [fingerprint for fingerprint, _ in whole.results]


# Collectives


def collectives(worker, device):
    """Each collective on a device, by name."""
    n = worker.world_size
    one, whole = torch.full((4,), worker.rank + 1.0, device=device), torch.zeros(4 * n, device=device)
    parts = [torch.zeros_like(one) for _ in range(n)]
    return {
        "all_reduce": lambda: dist.all_reduce(one.clone()),
        "broadcast": lambda: dist.broadcast(one.clone(), 0),
        "reduce": lambda: dist.reduce(one.clone(), 0),
        "all_gather": lambda: dist.all_gather(parts, one),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(whole, one),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(one.clone(), whole),
        "all_to_all_single": lambda: dist.all_to_all_single(torch.empty_like(whole), whole),
        "gather": lambda: dist.gather(one, parts if worker.rank == 0 else None, 0),
        "scatter": lambda: dist.scatter(one.clone(), [one] * n if worker.rank == 0 else None, 0),
    }


def every_collective(worker):
    """Call each collective on the rank's device, and on the CPU; return what those said that raised, by name."""
    said = {}
    for device in dict.fromkeys((worker.device.type, "cpu")):
        for name, call in collectives(worker, device).items():
            try:
                call()
            except RuntimeError as error:
                said[f"{name} on {device}"] = str(error).splitlines()[0]
    objects = [None] * worker.world_size
    dist.all_gather_object(objects, worker.rank)
    dist.broadcast_object_list(objects, 0)
    dist.barrier()
    assert objects == list(range(worker.world_size))
    return said


@needs_gpu
def test_one_rank_has_every_collective_by_nccl_twice_on_a_session():
    with labkit.Session(1) as alone:
        for _ in range(2):
            (said,) = labkit.launch(every_collective, on=alone, live=False).results
            assert said == {}


def test_ranks_that_share_a_device_have_each_collective_or_are_told_in_words(ranks):
    run = labkit.launch(every_collective, on=ranks, world_size=2, **SHARE, live=False)
    one, other = run.results
    assert one.keys() == other.keys(), "all ranks meet the same"
    assert not [name for name in one if name.endswith("cpu")]


# Arguments and results


def test_arguments_and_what_a_function_captures_arrive_on_the_ranks_device(ranks):
    weights = torch.arange(4.0, device=DEVICE)

    def takes_tensors(worker, given):
        assert given.device == weights.device == worker.device
        return given + weights

    run = labkit.launch(takes_tensors, torch.ones(4, device=DEVICE), on=ranks, **SHARE, live=False)
    assert {result.device.type for result in run.results} == {"cpu"}
    assert torch.equal(run.results[1], torch.arange(4.0) + 1)


# A kernel that spins


def spins(worker):
    worker.log(loss=1.0)
    torch.cuda._sleep(2**44)  # clock cycles: hours
    torch.ones(1, device=worker.device).sum().item()


@needs_real
@pytest.mark.parametrize("ends", ["by Stop", "by its time limit"])
def test_a_spinning_kernel_is_ended(ends):
    run = labkit.launch(spins, world_size=1, stall_s=3.0, live=False, wait=False)
    if ends == "by Stop":
        wait_for_step(run, 0)
        run.stop(grace_s=1.0)
    assert run.over.wait(LONG_S)
    if ends != "by Stop":
        assert "no rank logged, printed or returned anything for 3 s" in str(run.error)
        assert "in spins" in str(run.error)


@needs_real
def test_a_trace_has_nccls_calls():
    run = labkit.launch(train, world_size=1, trace=3, live=False, steps=8, width=512)
    kinds = {call.kind for call in run.trace.records[0].calls}
    assert any("all_reduce" in kind or "allreduce" in kind for kind in kinds), kinds


# Two GPUs


def returns_early(worker):
    if worker.rank == 0:
        dist.all_reduce(torch.ones(1, device=worker.device))
        torch.cuda.synchronize()


def dies(worker):
    if worker.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    returns_early(worker)


@needs_two
@pytest.mark.parametrize("ends", [returns_early, dies])
def test_a_rank_that_others_wait_for_in_vain_is_blamed_under_nccl(ends):
    run = labkit.launch(ends, world_size=2, stall_s=30, live=False, wait=False)
    assert run.over.wait(LONG_S)
    assert run.error.rank == 1


# Lessons


@needs_gpu
@pytest.mark.notebook
@pytest.mark.parametrize("number", ["00", "02", "04", "05", "07"])
def test_a_lesson_runs_on_the_gpu(number, tmp_path):
    from tests.tools.run_notebooks import FOLDER, execute  # papermill: every rank above imports this module

    (lesson,) = FOLDER.glob(f"{number}_*.ipynb")
    execute(lesson, tmp_path)
