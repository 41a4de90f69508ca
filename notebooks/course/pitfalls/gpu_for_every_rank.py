"""A GPU for every rank, whatever there is: an exhibit of the museum of pitfalls."""

from __future__ import annotations

import re

import torch
from torch import nn

from course.pitfalls.base import Exhibit

EXHIBIT = Exhibit(
    wing="machines",
    title="A GPU for every rank, whatever there is",
    story="""
    One text says `world_size = 4`, then `model.cuda(rank)`. This is the first rank for which
    there is no GPU: where does its model go?
    """,
    choices=(
        "it stays on the CPU",
        "two ranks share a GPU",
        "an error",
    ),
    shows=3,
    kind="error",
)


@EXHIBIT.broken
def gpu_for_every_rank():
    rank = torch.cuda.device_count()
    return next(nn.Linear(2, 2).cuda(rank).parameters()).device


@EXHIBIT.symptom
def symptom(seen):
    return re.search("CUDA|NVIDIA|ordinal", seen) and "Error" in seen


@EXHIBIT.right
def right():
    """Ask how many GPUs there are, and start no more ranks than that: NCCL refuses two ranks on
    one GPU. Without a GPU every rank computes on the CPU, and there may be any number."""
    gpus = torch.cuda.device_count()
    ranks = min(4, gpus) if gpus else 4
    devices = [torch.device("cuda", rank) if gpus else torch.device("cpu") for rank in range(ranks)]
    held = [next(nn.Linear(2, 2).to(device).parameters()).device for device in devices]
    assert held == devices
    assert not gpus or len(set(held)) == ranks, "a GPU for each"
    return ", ".join(map(str, held))
