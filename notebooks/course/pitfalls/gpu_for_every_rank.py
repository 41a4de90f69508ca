"""A GPU for every rank, whatever there is."""

import re

import torch
from torch import nn

from course.pitfalls.base import Exhibit, Expected

EXHIBIT = Exhibit(
    wing="machines",
    title="world_size = 4",
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
    gives=Expected(
        "an error of CUDA", lambda seen: re.search("CUDA|NVIDIA|ordinal", seen) and "Error" in seen
    ),
    expects=Expected(
        "the CPU, or a GPU that there is",
        lambda found: found.type == "cpu" or found.index < torch.cuda.device_count(),
    ),
    kind="error",
)


@EXHIBIT.broken
def gpu_for_every_rank():
    rank = torch.cuda.device_count()
    return next(nn.Linear(2, 2).cuda(rank).parameters()).device


@EXHIBIT.right
def right():
    """Count the GPUs, and start no more ranks than that: NCCL refuses two ranks on one GPU.
    Without a GPU the ranks compute on the CPU, and there may be any number of them."""
    gpus = torch.cuda.device_count()
    last_rank = min(4, gpus or 4) - 1
    device = torch.device("cuda", last_rank) if gpus else torch.device("cpu")
    return next(nn.Linear(2, 2).to(device).parameters()).device
