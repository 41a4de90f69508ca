"""DataParallel inside every rank: an exhibit of the museum of pitfalls."""

from __future__ import annotations

import torch
from torch import nn

from course.pitfalls.base import Exhibit

EXHIBIT = Exhibit(
    wing="machines",
    title="DataParallel inside every rank",
    story="""
    One text gives each rank a model on `cuda:rank`, wrapped in `nn.DataParallel` over all GPUs.
    This is rank 1: which GPUs does it use?
    """,
    choices=(
        "it uses GPU 1",
        "it uses all GPUs",
        "an error",
    ),
    shows=3,
    kind="error",
    needs="2 GPUs",
)


@EXHIBIT.broken
def data_parallel_in_ranks():
    model = nn.DataParallel(nn.Linear(2, 2)).cuda(1)
    return model(torch.ones(4, 2, device="cuda:1")).shape


@EXHIBIT.symptom
def symptom(seen):
    return "device_ids[0]" in seen


@EXHIBIT.right
def right():
    """`DataParallel` belongs to one process with all GPUs, DDP to a process per GPU. Never
    both."""
    model = nn.Linear(2, 2).cuda(1)  # DistributedDataParallel(model, device_ids=[1]) in a group
    output = model(torch.ones(4, 2, device="cuda:1"))
    assert output.device == torch.device("cuda:1")
    return output.device
