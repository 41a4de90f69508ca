"""Where ranks compute, and what is said of GPUs: what can be decided without one. No process is started but one."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from labkit.engines.arguments import check_device
from labkit.monitor.state import RunState
from labkit.protocol import events
from labkit.protocol.job import RankInfo
from labkit.rank.device import OVER_GLOO, OWN_GPU, Placement, place, settle
from labkit.rank.log_batcher import number
from tests.support.fake_engine import A_JOB

# The notebook's part


@pytest.mark.parametrize(
    ("world_size", "gpus", "device", "backend", "reserved", "found"),
    [
        (2, 0, None, None, 0, Placement(0, "gloo")),
        (1, 1, None, None, 0, Placement(1, OWN_GPU)),
        (2, 1, None, None, 0, Placement(0, "gloo", unused=1)),  # the laptop
        (2, 1, "cuda", None, 0, Placement(1, "gloo")),
        (2, 4, "cpu", None, 0, Placement(0, "gloo")),
        (2, 4, None, "nccl", 0, Placement(4, "nccl")),
        (1, 2, None, None, 4, Placement(0, "gloo", unused=2)),  # one rank of a session that has four
        (1, 2, None, "nccl", 4, Placement(2, "nccl")),
        (4, None, None, None, 0, Placement(None, None)),
        (4, None, "cpu", None, 0, Placement(0, "gloo")),
    ],
)
def test_ranks_have_a_gpu_each_or_compute_on_the_cpu(world_size, gpus, device, backend, reserved, found, monkeypatch):
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    assert place(world_size, gpus, device, backend, reserved) == found


@pytest.mark.parametrize(
    ("device", "backend", "gpus", "said"),
    [
        ("cuda:1", None, 2, r"device is 'cpu', 'cuda' .* got 'cuda:1'. Which GPU a rank has is worker.device"),
        (0, None, 2, "got 0"),
        ("cuda", None, 0, "device='cuda' needs a GPU, and this machine has none that can be used"),
        ("cpu", "nccl", 2, "device='cpu', but backend 'nccl' takes CUDA tensors; use 'gloo'"),
    ],
)
def test_a_device_on_which_ranks_cannot_compute_is_refused(device, backend, gpus, said):
    with pytest.raises(ValueError, match=said):
        check_device(device, backend, gpus)


# A rank's part


class Cuda:
    """What of `torch.cuda` a rank asks and calls as it begins."""

    def __init__(self, monkeypatch, count):
        self.calls = []
        for name, function in {
            "device_count": lambda: count,
            "is_initialized": lambda: False,
            "set_device": lambda device: self.calls.append(f"set {device}"),
            "_lazy_call": lambda call: self.calls.append(f"later {call.args[0]}"),
            "get_device_properties": lambda index: SimpleNamespace(uuid=f"uuid-{index}"),
        }.items():
            monkeypatch.setattr(torch.cuda, name, function)
        monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
        for name in ("CUDA_VISIBLE_DEVICES", "LOCAL_RANK"):
            monkeypatch.setenv(name, "as it was")


@pytest.mark.parametrize(
    ("gpus", "rank", "ranks", "device", "backend", "found", "calls"),
    [
        (2, 1, 2, None, OWN_GPU, "cuda:1", ["set cuda:1"]),
        (1, 1, 2, "cuda", "gloo", "cuda:0", ["later cuda:0"]),
        (2, 3, 4, "cuda", "gloo", "cuda:1", ["later cuda:1"]),
        (0, 1, 2, None, "gloo", "cpu", []),
    ],
)
def test_a_rank_makes_its_gpu_the_current_one_and_no_context_where_it_need_not(
    gpus, rank, ranks, device, backend, found, calls, monkeypatch
):
    cuda = Cuda(monkeypatch, max(1, gpus))
    job = A_JOB._replace(cuda_devices=gpus, device=device, backend=backend, unused_gpus=0 if gpus else 1)
    settled = settle(job, RankInfo(rank, rank, ranks, ranks), dist.HashStore())
    assert (str(settled.device), settled.backend, cuda.calls) == (found, backend, calls)
    assert ("they compute on the CPU" in settled.note) == (found == "cpu") == (not os.environ["CUDA_VISIBLE_DEVICES"])
    assert (settled.note == OVER_GLOO) == (gpus > 0 and ranks > gpus)


@pytest.mark.parametrize("other", ["another", "the same"])
def test_where_each_rank_sees_one_gpu_code_for_torchrun_finds_its_own(other, monkeypatch):
    """As under `srun --gpus-per-task=1`, or on Ray."""
    cuda = Cuda(monkeypatch, 1)
    store = dist.HashStore()
    store.set("labkit/gpu/0", "uuid-0" if other == "the same" else "uuid-of-another")
    settled = settle(A_JOB._replace(cuda_devices=None, backend=None), RankInfo(1, 1, 2, 2), store)
    if other == "the same":
        assert (settled.device.type, settled.backend, cuda.calls) == ("cpu", "gloo", [])
        assert "2 ranks, 1 GPU" in settled.note
    else:
        assert (str(settled.device), settled.backend, cuda.calls) == ("cuda:0", OWN_GPU, ["set cuda:0"])
        assert os.environ["LOCAL_RANK"] == "0"


# What is said


def test_ranks_that_share_a_gpu_are_told_of_by_the_run():
    state = RunState(4, 1.0, 0.0)
    for rank in range(4):
        state.take(events.Started(rank, f"cuda:{rank % 2}", OVER_GLOO), 0.0, 0.0)
    assert state.placement == "2 ranks share cuda:0, 2 ranks share cuda:1 (by gloo: without send, recv and DTensor)"
    for rank in range(4):
        state.take(events.Started(rank, "cpu", "2 ranks, 1 GPU: they compute on the CPU"), 0.0, 0.0)
    assert state.placement == "2 ranks, 1 GPU: they compute on the CPU"


def test_a_value_on_a_broken_gpu_raises_the_gpus_own_error_when_it_is_logged():
    class OnBrokenGpu:
        shape, is_cuda = (1,), True

        def item(self):
            raise RuntimeError("CUDA error: device-side assert triggered")

    with pytest.raises(RuntimeError, match="device-side assert"):
        number("loss", OnBrokenGpu(), 1)
    with pytest.raises(TypeError, match="takes one number"):
        number("loss", torch.ones(1, device="meta"), 1)
