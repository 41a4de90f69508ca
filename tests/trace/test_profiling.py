"""What people measure by hand, and what is not counted. No process is started."""

from __future__ import annotations

import math

import torch.distributed as dist

from labkit import profiling


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
