"""NCCL without a GPU."""

import re

import torch
import torch.distributed as dist

from course.pitfalls.base import Exhibit, Expected

EXHIBIT = Exhibit(
    wing="machines",
    title='The backend "nccl"',
    story="""
    Three of the five texts say `"nccl"`, whatever the machine has. This one has no GPU:
    what happens?
    """,
    choices=(
        "gloo takes its place",
        "an error",
        "it works on the CPU, slowly",
    ),
    shows=2,
    gives=Expected(
        "an error of NCCL", lambda seen: re.search("CUDA|GPU|NCCL", seen) and "Error" in seen
    ),
    expects="gloo",
    kind="error",
    needs="no GPU",
)


@EXHIBIT.broken
def nccl_without_gpu():
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    return dist.get_backend()


@EXHIBIT.right
def right():
    """NCCL works on GPU memory only. Choose the backend by the device."""
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert dist.get_backend() == backend
        return dist.get_backend()
    finally:
        dist.destroy_process_group()
