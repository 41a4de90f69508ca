"""What is read from a profiler's events, and what is not counted. No process is started."""

from __future__ import annotations

import math
from types import SimpleNamespace

import torch.distributed as dist
from torch.autograd import DeviceType

from labkit import profiling


def event(name, start, end, device=DeviceType.CPU):
    return SimpleNamespace(name=name, device_type=device, time_range=SimpleNamespace(start=start, end=end))


STEP = event(profiling.STEP, 100, 900)


def test_gloo_communicates_on_the_host_and_waiting_to_receive_is_left_out():
    events = [STEP, event("gloo:all_reduce", 300, 500), event("gloo:recv", 500, 800), event("aten::mm", 100, 300)]
    assert profiling.traced(events) == ([100], [(300, 500)])


def test_of_nccl_the_time_on_the_device_counts_not_that_of_handing_over():
    events = [
        STEP,
        event(profiling.STEP, 120, 880, DeviceType.CUDA),  # the step's own shadow on the device
        event("nccl:all_reduce", 300, 310),
        event("nccl:all_reduce", 350, 700, DeviceType.CUDA),
        event("nccl:recv 0<-1", 700, 800, DeviceType.CUDA),
        event("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*)", 351, 699, DeviceType.CUDA),
    ]
    assert profiling.traced(events) == ([100], [(350, 700)])
    kernels_only = [e for e in events if not (e.name.startswith("nccl:") and e.device_type == DeviceType.CUDA)]
    assert profiling.traced(kernels_only) == ([100], [(351, 699)])


def test_bytes_that_nobody_counts_are_not_a_number(monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    assert math.isnan(profiling.counted_sent()), "NCCL does not send by TCP"
    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    monkeypatch.setattr(profiling, "bytes_sent", lambda: 5)
    assert profiling.counted_sent() == 5

    def no_count():
        raise OSError("only Linux says how much a socket has sent")

    monkeypatch.setattr(profiling, "bytes_sent", no_count)
    assert math.isnan(profiling.counted_sent())
