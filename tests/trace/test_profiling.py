"""What is read from a profiler's events, and what is not counted. No process is started."""

from __future__ import annotations

import math

import torch.distributed as dist

from labkit import profiling
from labkit.trace.profiling import Event

STEP = Event(profiling.STEP, 100, 900)


def test_gloo_communicates_on_the_host_and_waiting_to_receive_is_left_out():
    events = [STEP, Event("gloo:all_reduce", 300, 500), Event("gloo:recv", 500, 800), Event("aten::mm", 100, 300)]
    assert profiling.traced(events) == ([100], [(300, 500)])


def test_of_nccl_the_time_on_the_device_counts_not_that_of_handing_over():
    events = [
        STEP,
        Event(profiling.STEP, 120, 880, on_device=True),  # the step's own shadow on the device
        Event("nccl:all_reduce", 300, 310),
        Event("nccl:all_reduce", 350, 700, on_device=True),
        Event("nccl:recv 0<-1", 700, 800, on_device=True),
        Event("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*)", 351, 699, on_device=True),
        Event("ncclDevKernel_SendRecv(ncclDevComm*)", 701, 799, on_device=True),
    ]
    assert profiling.traced(events) == ([100], [(350, 700)])
    kernels_only = [e for e in events if not (e.name.startswith("nccl:") and e.on_device)]
    assert profiling.traced(kernels_only) == ([100], [(351, 699), (701, 799)])


def test_bytes_that_nobody_counts_are_not_a_number(monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    assert math.isnan(profiling.bytes_sent()), "NCCL does not send by TCP"
    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    monkeypatch.setattr(profiling.host, "bytes_sent", lambda: 5)
    assert profiling.bytes_sent() == 5

    def no_count():
        raise OSError("only Linux says how much a socket has sent")

    monkeypatch.setattr(profiling.host, "bytes_sent", no_count)
    assert math.isnan(profiling.bytes_sent())
