"""DataParallel inside every rank."""

import torch
from torch import nn

from course.pitfalls.base import Exhibit, has

EXHIBIT = Exhibit(
    wing="machines",
    title="DataParallel in rank 1",
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
    gives=has("device_ids[0]"),
    expects=torch.device("cuda:1"),
    kind="error",
    needs="2 GPUs",
)


@EXHIBIT.broken
def data_parallel_in_ranks():
    model = nn.DataParallel(nn.Linear(2, 2)).cuda(1)
    return model(torch.ones(4, 2, device="cuda:1")).device


@EXHIBIT.right
def right():
    """`DataParallel` is for one process with all GPUs, DDP for one process per GPU. Never
    combine them."""
    model = nn.Linear(2, 2).cuda(1)  # DistributedDataParallel(model, device_ids=[1]) in a group
    return model(torch.ones(4, 2, device="cuda:1")).device
