"""Where a rank computes: on a GPU of its own, on one that it shares, or on the CPU. Nothing else decides that.

    on a machine                         `device=None`                   `device="cuda"`
    a GPU for each rank or more          its own GPU; NCCL, gloo for CPU tensors ("cpu:gloo,cuda:nccl")
    fewer GPUs than ranks                the CPU; gloo                   a GPU that ranks share; gloo
    no GPU that can be used              the CPU; gloo                   ValueError

NCCL refuses two ranks on one GPU. gloo reduces, broadcasts and gathers CUDA tensors by way of the CPU, but cannot send
them, and has none of what DTensor rests on: FSDP2, tensor parallel, pipelines and ring attention fail, or kill their
rank by a signal. So ranks share a GPU only where you ask for it, and the run says so.

Ranks on the CPU see no GPU: `torch.cuda.is_available()` is False there, for code that decides by that.

CUDA is touched where the device is used: a rank with a GPU of its own has a context when it joins NCCL's group, as
under torchrun; one that shares a GPU has one as soon as it puts something there; one on the CPU never has.
"""

from __future__ import annotations

import functools
import os
import socket
import sys
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from labkit.rank.file_store import exchange

if TYPE_CHECKING:
    from labkit.protocol.job import Job, RankInfo

OWN_GPU = "cpu:gloo,cuda:nccl"
"""Backend of ranks with a GPU each: PyTorch's own default, under which scripts may reduce CPU tensors, too."""


OVER_GLOO = "by gloo: without send, recv and DTensor"
"""What is said of ranks that share a GPU."""


class Placement(NamedTuple):
    """Where the ranks of a job compute, as far as the notebook can decide it."""

    gpus: int | None
    """GPUs that the ranks of a machine share out; 0 means the CPU, None those that a rank finds."""
    backend: str | None
    """None: the ranks find out."""
    unused: int = 0
    """GPUs that there are, where the ranks compute on the CPU because they are too few."""


def place(
    world_size: int,
    gpus: int | None,
    device: str | None = None,
    backend: str | None = None,
    reserved: int = 0,
) -> Placement:
    """Decide where ranks compute. `gpus` are those of their machine that can be used; None: the ranks find out.

    `reserved` is how many ranks a session has: all that runs there runs on one kind of device, so that what one rank
    computes can be compared with what all do. Who asks for NCCL, or for GPUs, gets what was asked for.
    """
    if device == "cpu":
        return Placement(0, backend or "gloo")
    if gpus is None:
        return Placement(None, backend)
    needed = world_size if is_nccl(backend) or device == "cuda" else max(world_size, reserved)
    if gpus >= needed:
        return Placement(gpus, backend or (OWN_GPU if gpus and dist.is_nccl_available() else "gloo"))
    if device == "cuda":
        return Placement(gpus, backend or "gloo")
    return Placement(0, backend or "gloo", unused=gpus)


def is_nccl(backend: str | None) -> bool:
    """Whether CUDA tensors go by NCCL."""
    return backend is not None and any(part.rpartition(":")[2] == "nccl" for part in backend.split(","))


# In a rank


class Settled(NamedTuple):
    """Where a rank computes, and how it speaks with the others."""

    device: torch.device
    backend: str
    where: str
    """The device as the notebook tells devices apart: with its machine, where that matters. "cpu"."""
    note: str = ""
    """Why it is not the rank's own GPU though there are GPUs, or what a shared one lacks; "" for nothing to say."""


def settle(job: Job, info: RankInfo, store: dist.Store) -> Settled:
    """Decide where this rank computes, make that the current device, and return it."""
    if job.cuda_devices is not None:
        count = job.cuda_devices
        has_own, backend = bool(count) and info.local_world_size <= count, job.backend or "gloo"
    else:
        count = torch.cuda.device_count()
        has_own = _all_have_own(info, count, store)
        backend = job.backend or (OWN_GPU if has_own and dist.is_nccl_available() else "gloo")
    if not count or not (has_own or job.device == "cuda"):
        few = count if job.cuda_devices is None else job.unused_gpus
        # Without it Accelerate has each rank train alone: `accelerate launch --cpu` sets it for its ranks.
        os.environ.setdefault("ACCELERATE_USE_CPU", "true")
        if torch.cuda.device_count() and not torch.cuda.is_initialized():
            # So that code which looks for a GPU itself finds none, and does not put all ranks on the first.
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        return Settled(torch.device("cpu"), backend, "cpu", _too_few(few, info) if few else "")
    device = torch.device("cuda", info.local_rank % count)
    if is_nccl(backend):
        torch.cuda.set_device(device)  # before NCCL, which else begins on GPU 0 on every rank
    else:
        # As soon as anything is put on a GPU, that is the current one; until then there is no context.
        torch.cuda._lazy_call(functools.partial(torch.cuda.set_device, device))
    if count == 1 and info.local_rank:
        # Each rank sees one GPU, its own: code written for torchrun takes number LOCAL_RANK. torchrun itself sets it
        # to 0 under --virtual-local-rank.
        os.environ["LOCAL_RANK"] = "0"
    where = f"{device} on {socket.gethostname()}" if job.cuda_devices is None else str(device)
    return Settled(device, backend, where, "" if has_own or is_nccl(backend) else OVER_GLOO)


def _too_few(gpus: int, info: RankInfo) -> str:
    return (
        f"{info.local_world_size} ranks, {gpus} GPU{'s' if gpus > 1 else ''}: they compute on the CPU "
        '(device="cuda" has them share)'
    )


def _all_have_own(info: RankInfo, count: int, store: dist.Store) -> bool:
    """Whether every rank has a GPU of its own, wherever the ranks are: by the GPUs' own numbers."""
    mine = ""
    if count:
        try:
            mine = str(torch.cuda.get_device_properties(info.local_rank % count).uuid)
        except (RuntimeError, AssertionError) as error:
            print(f"labkit: rank {info.rank} cannot use its GPU: {str(error).splitlines()[0]}", file=sys.stderr)
    gpus = set(exchange(store, "labkit/gpu", mine, info))
    return "" not in gpus and len(gpus) == info.world_size


# A GPU after a job


def is_broken() -> bool:
    """Whether a kernel has failed in this process: its CUDA context is then of no use, whatever is called next."""
    if not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def peak_bytes() -> int:
    """Return the most that PyTorch has allocated on this process's GPUs, of all of them together."""
    if not torch.cuda.is_initialized():
        return 0
    return sum(torch.cuda.max_memory_allocated(index) for index in range(torch.cuda.device_count()))


def forget_peak() -> None:
    """Begin to measure anew."""
    if torch.cuda.is_initialized():
        for index in range(torch.cuda.device_count()):
            torch.cuda.reset_peak_memory_stats(index)
