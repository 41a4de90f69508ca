"""What one GPU decides: collectives, arguments and results, errors of kernels, a kernel that spins, memory, precision.

Where two are needed, or what is measured needs a real one, the test says so.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

import labkit
from tests.conftest import LONG_S, wait_for_step
from tests.gpu.test_gpu import DEVICE, GPUS, MARKS, MIB, SHARE, needs_gpu, needs_two, train
from tests.pretended_gpu import is_on

pytestmark = MARKS

needs_real = pytest.mark.skipif(not GPUS or is_on(), reason="found no GPU: a pretended one has no kernels and no time")


@pytest.fixture(scope="module")
def ranks():
    with labkit.Session(2, **({"device": "cuda"} if GPUS else {})) as ranks:
        yield ranks


# Collectives


def every_collective(worker):
    """Call each collective on the device, and on the CPU; return what came of those that raised, by name."""
    n, said = worker.world_size, {}

    def tried(name, call):
        try:
            call()
        except RuntimeError as error:
            said[name] = str(error).splitlines()[0]

    for device in (worker.device, torch.device("cpu")):
        one = torch.full((4,), worker.rank + 1.0, device=device)
        parts = [torch.zeros_like(one) for _ in range(n)]
        whole = torch.zeros(4 * n, device=device)
        calls = {
            "all_reduce": lambda one=one: dist.all_reduce(one.clone()),
            "broadcast": lambda one=one: dist.broadcast(one.clone(), 0),
            "reduce": lambda one=one: dist.reduce(one.clone(), 0),
            "all_gather": lambda one=one, parts=parts: dist.all_gather(parts, one),
            "all_gather_into_tensor": lambda one=one, whole=whole: dist.all_gather_into_tensor(whole, one),
            "reduce_scatter_tensor": lambda one=one, whole=whole: dist.reduce_scatter_tensor(one.clone(), whole),
            "all_to_all_single": lambda whole=whole: dist.all_to_all_single(torch.empty_like(whole), whole),
            "gather": lambda one=one, parts=parts: dist.gather(one, parts if worker.rank == 0 else None, 0),
            "scatter": lambda one=one, parts=parts: dist.scatter(
                one.clone(), [one] * n if worker.rank == 0 else None, 0
            ),
        }
        for name, call in calls.items():
            tried(f"{name} on {device.type}", call)
    objects = [None] * n
    dist.all_gather_object(objects, worker.rank)
    dist.broadcast_object_list(objects, 0)
    dist.barrier()
    assert objects == list(range(n))
    return said


@needs_gpu
def test_one_rank_has_every_collective_by_nccl_twice_on_a_session(found):
    with labkit.Session(1) as alone:
        for _ in range(2):
            (said,) = labkit.launch(every_collective, on=alone, live=False).results
            assert said == {}
    found("9 collectives on GPU and CPU, and objects")


def test_ranks_that_share_a_device_have_each_collective_or_are_told_in_words(ranks, found):
    run = labkit.launch(every_collective, on=ranks, **SHARE, live=False)
    one, other = run.results
    assert one.keys() == other.keys(), "all ranks meet the same"
    assert not [name for name in one if name.endswith("cpu")]
    found(f"not on {DEVICE}: {', '.join(one) or 'none'}")


# Arguments and results


def test_arguments_and_what_a_function_captures_arrive_on_the_ranks_device(ranks, found):
    weights = torch.arange(4.0, device=DEVICE)

    def takes_tensors(worker, given):
        assert given.device == weights.device == worker.device
        return given + weights

    run = labkit.launch(takes_tensors, torch.ones(4, device=DEVICE), on=ranks, **SHARE, live=False)
    assert {result.device.type for result in run.results} == {"cpu"}
    assert torch.equal(run.results[1], torch.arange(4.0) + 1)
    found(f"to {DEVICE}, back on the CPU")


NOTEBOOK = """
import torch, labkit
from tests.gpu.test_gpu import SHARE, returns_tensors

(model, state, tensor), _ = labkit.launch(returns_tensors, world_size=2, **SHARE, live=False).results
devices = {each.device.type for each in (*model.parameters(), *state.values(), tensor)}
print(devices, torch.equal(model.weight, state["weight"]), torch.cuda.is_initialized())
"""


def test_a_notebook_that_only_gets_results_makes_no_context(found):
    done = subprocess.run([sys.executable, "-c", NOTEBOOK], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "{'cpu'} True False"
    found("results on the CPU, CUDA not initialised")


# Errors


@needs_real
def test_out_of_memory_on_a_session_leaves_its_ranks(found):
    with labkit.Session(1) as alone:
        before = alone.pids
        run = labkit.launch(lambda worker: torch.empty(2**46, device=worker.device), on=alone, live=False, wait=False)
        assert run.over.wait(LONG_S)
        assert "out of memory" in str(run.error)
        assert labkit.launch(every_collective, on=alone, live=False).results == [{}]
        assert alone.pids == before
    found("the same process computes on")


# A kernel that spins


def spins(worker):
    worker.log(loss=1.0)
    torch.cuda._sleep(2**44)  # clock cycles: hours
    torch.ones(1, device=worker.device).sum().item()


@needs_real
def test_a_spinning_kernel_is_stopped_and_the_cell_is_free(found):
    run = labkit.launch(spins, world_size=1, live=False, wait=False)
    wait_for_step(run, 0)
    began_s = time.monotonic()
    run.stop(grace_s=1.0)
    assert run.over.wait(LONG_S)
    found(f"over {time.monotonic() - began_s:.1f} s after Stop, with 1 s to stop by itself")


@needs_real
def test_a_spinning_kernel_meets_the_time_limit_and_the_line_is_named(found):
    run = labkit.launch(spins, world_size=1, stall_s=3.0, live=False, wait=False)
    assert run.over.wait(LONG_S)
    assert "no rank logged, printed or returned anything for 3 s" in str(run.error)
    assert "in spins" in str(run.error)
    found("by its time limit, with the stack")


# Figures


def log_each_step(worker, logs):
    model = nn.Linear(1024, 1024).to(worker.device)
    x = torch.randn(256, 1024, device=worker.device)
    times = []
    for step in range(220):
        began_s = time.perf_counter()
        loss = model(x).square().mean()
        loss.backward()
        if logs:
            worker.log(loss=loss)
        times.append(time.perf_counter() - began_s)
        if step == 19:
            times.clear()
    loss.item()
    return sorted(times)[len(times) // 2]


def test_what_logging_a_loss_costs_a_step(ranks, found):
    with_log, without = (
        labkit.launch(log_each_step, logs, on=ranks, world_size=1, **SHARE, live=False).results[0]
        for logs in (True, False)
    )
    found(f"{1e6 * with_log:.0f} µs a step with worker.log(loss=loss), {1e6 * without:.0f} without")


def allocates(worker):
    held = torch.zeros(64 * MIB, dtype=torch.uint8, device=worker.device)
    return torch.cuda.max_memory_allocated(worker.device) if held.is_cuda else None


@needs_gpu
def test_a_runs_peak_of_memory_is_pytorchs_own(found):
    run = labkit.launch(allocates, world_size=1, live=False)
    assert run.peak_device_bytes == run.results
    assert run.results[0] >= 64 * MIB
    found(f"{run.results[0] / MIB:.0f} MiB")


def convolve(worker, tf32):
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.manual_seed(0)
    layer, x = nn.Conv2d(64, 64, 3), torch.randn(8, 64, 28, 28)
    exact = layer.double()(x.double()).mean().item()
    return abs(layer.float().to(worker.device)(x.to(worker.device)).double().mean().item() - exact)


@needs_real
def test_without_tf32_a_gpu_computes_as_exactly_as_float32_does(found):
    off, on = (labkit.launch(convolve, tf32, world_size=1, live=False).results[0] for tf32 in (False, True))
    assert off < 1e-6
    found(f"a convolution's mean is off by {off:.1e} without TF32, by {on:.1e} with it")


@needs_real
def test_a_trace_has_nccls_calls(found):
    run = labkit.launch(train, world_size=1, trace=3, live=False, steps=8, width=512)
    kinds = {call.kind for call in run.trace.records[0].calls}
    assert any("all_reduce" in kind or "allreduce" in kind for kind in kinds), kinds
    found(", ".join(sorted(kinds)))


# Two GPUs


@needs_two
def test_an_early_return_is_named_under_nccl(found):
    def returns_early(worker):
        worker.log(loss=1.0)
        if worker.rank == 0:
            dist.all_reduce(torch.ones(1, device=worker.device))
            torch.cuda.synchronize()

    run = labkit.launch(returns_early, world_size=2, stall_s=30, live=False, wait=False)
    assert run.over.wait(LONG_S)
    found(str(run.error).splitlines()[0][:100])


@needs_two
def test_a_killed_rank_is_blamed_under_nccl(found):
    def dies(worker):
        if worker.rank == 1:
            os.kill(os.getpid(), 9)
        dist.all_reduce(torch.ones(1, device=worker.device))
        torch.cuda.synchronize()

    run = labkit.launch(dies, world_size=2, live=False, wait=False)
    assert run.over.wait(LONG_S)
    assert run.error.rank == 1
    found(str(run.error).splitlines()[0][:100])


@needs_two
def test_point_to_point_is_seen_in_traces(found):
    def ping(worker, steps):
        x = torch.ones(2**20, device=worker.device)
        for step in range(steps):
            dist.send(x, 1) if worker.rank == 0 else dist.recv(x, 0)
            worker.log(step=step, loss=1.0)

    run = labkit.launch(ping, 8, world_size=2, trace=3, live=False)
    kinds = {call.kind for rank in run.trace.records for call in rank.calls}
    assert any(re.search("send|recv", kind) for kind in kinds), kinds
    found(", ".join(sorted(kinds)))


@needs_two
def test_data_parallel_in_one_rank_uses_both(found):
    def both(worker):
        model = nn.DataParallel(nn.Linear(8, 8).to("cuda:0"), device_ids=[0, 1])
        return model(torch.ones(4, 8, device="cuda:0")).shape

    run = labkit.launch(both, world_size=1, live=False)
    assert run.results[0] == (4, 8)
    found("nn.DataParallel on two GPUs in one rank")
