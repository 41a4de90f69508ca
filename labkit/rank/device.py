"""Where a rank computes: on a GPU of its own, on one that it shares, or on the CPU. Nothing else decides that.

    on a machine                         `device=None`                   `device="cuda"`
    a GPU for each rank or more          its own GPU; NCCL, gloo for CPU tensors ("cpu:gloo,cuda:nccl")
    fewer GPUs than ranks                the CPU; gloo                   a GPU that ranks share; gloo
    no GPU that can be used              the CPU; gloo                   ValueError

NCCL refuses two ranks on one GPU. gloo reduces, broadcasts and gathers CUDA tensors by way of the CPU, but cannot send
them, and has none of what DTensor rests on: FSDP2, tensor parallel, pipelines and ring attention would kill their rank
by a signal. So ranks share a GPU only where the reader asks for it, and what gloo cannot do there is an error in
words.

Ranks on the CPU see no GPU: `torch.cuda.is_available()` is False there, for code that decides by that.

CUDA is touched where the device is used: a rank with a GPU of its own has a context when it joins NCCL's group, as
under torchrun; one that shares a GPU has one as soon as it puts something there; one on the CPU never has.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import socket
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from labkit.protocol.pages import help_hint, reader_stacklevel
from labkit.rank.local_rendezvous import exchange
from labkit.system import driver

if TYPE_CHECKING:
    from labkit.protocol.job import Job, RankInfo

OWN_GPU = "cpu:gloo,cuda:nccl"
"""Backend of ranks with a GPU each: PyTorch's own default, under which scripts may reduce CPU tensors, too."""

PROBE_S = 30.0
"""How long the driver may take to answer; on a machine with many GPUs that sleep it takes seconds."""


class Placement(NamedTuple):
    """Where the ranks of a job compute, as far as the notebook can decide it."""

    gpus: int | None
    """GPUs that the ranks of a machine share out; 0 means the CPU, None those that a rank finds."""
    backend: str | None
    """None: the ranks find out."""
    spared: int = 0
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
    return Placement(0, backend or "gloo", spared=gpus)


def is_nccl(backend: str | None) -> bool:
    """Whether CUDA tensors go by NCCL."""
    return backend is not None and any(part.rpartition(":")[2] == "nccl" for part in backend.split(","))


# The GPUs that can be used


def usable_gpus() -> int:
    """Return how many GPUs the ranks of this machine can use; says once why, if that is fewer than there are.

    PyTorch counts by NVML, without initialising CUDA: also those that CUDA refuses, because the driver is too old for
    the wheel, because a container lacks a part of the driver, or because they are split (MIG). So the driver is asked,
    too, in a process of its own: asking it here would keep the notebook's forked children from using CUDA.
    """
    count = torch.cuda.device_count()
    if not count or torch.cuda.is_initialized():
        return count
    can_use, why = _asked(os.environ.get("CUDA_VISIBLE_DEVICES"), count)
    if why:
        _say_once(why)
    return can_use


@functools.cache
def _asked(visible: str | None, count: int) -> tuple[int, str]:
    """Return how many GPUs CUDA itself finds, and why it is not `count`; "" if it is."""
    try:
        program = [sys.executable, driver.__file__]
        asked = subprocess.run(program, capture_output=True, timeout=PROBE_S, check=True, stdin=subprocess.DEVNULL)
        found = json.loads(asked.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return count, f"the driver could not be asked whether the GPUs can be used ({type(error).__name__})"
    return judge(found, count, torch.version.cuda or "")


def judge(found: dict[str, Any], count: int, built_for: str) -> tuple[int, str]:
    """Return how many of `count` GPUs can be used, and why not all, by what the driver has said."""
    if not built_for:
        return count, ""
    driver = found.get("version", 0)
    have, need = f"{driver // 1000}.{driver % 1000 // 10}", int(built_for.partition(".")[0])
    if error := found.get("error"):
        return 0, f"{_gpus(count)} cannot be used: {error}. The ranks compute on the CPU"
    if driver // 1000 < need:
        return 0, (
            f"{_gpus(count)} cannot be used: the driver is for CUDA {have}, and this PyTorch is built for {built_for}. "
            "The ranks compute on the CPU; update the driver, or install a PyTorch built for an older CUDA"
        )
    if found["count"] < count:
        return found["count"], f"of {_gpus(count)} CUDA can use {found['count']}: they may be split (MIG)"
    return count, ""


def _gpus(count: int) -> str:
    return "this machine's GPU" if count == 1 else f"this machine's {count} GPUs"


_said: set[str] = set()


def _say_once(why: str) -> None:
    if why not in _said:
        _said.add(why)
        warnings.warn(f"labkit: {why}\n{help_hint('gpu')}", stacklevel=reader_stacklevel())


# In a rank


class Settled(NamedTuple):
    """Where a rank computes, and how it speaks with the others."""

    device: torch.device
    backend: str
    where: str
    """The device as the notebook tells devices apart: with its machine, where that matters. "cpu"."""
    note: str = ""
    """Why it is not the rank's own GPU though there are GPUs; "" where there is nothing to say."""


def settle(job: Job, info: RankInfo, store: dist.Store) -> Settled:
    """Decide where this rank computes, make that the current device, and return it.

    Raises RuntimeError if the GPUs are not those that the notebook has counted.
    """
    here = 0 if job.cuda_devices == 0 else torch.cuda.device_count()
    _check_that_cuda_sees(here)
    if job.cuda_devices is not None:
        _check_count(here, job.cuda_devices, info)
        count = job.cuda_devices
        has_own, backend = bool(count) and info.local_world_size <= count, job.backend or "gloo"
    else:
        count = here
        has_own = _all_have_own(info, count, store)
        backend = job.backend or (OWN_GPU if has_own and dist.is_nccl_available() else "gloo")
    if not count or not (has_own or job.device == "cuda"):
        few = count if job.cuda_devices is None else job.spared_gpus
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
    return Settled(device, backend, f"{device} on {socket.gethostname()}" if job.cuda_devices is None else str(device))


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


def _check_count(here: int, counted: int, info: RankInfo) -> None:
    if counted and here < min(counted, info.local_world_size):
        raise RuntimeError(
            f"rank {info.rank} finds {here} GPUs where the notebook found {counted}: one has failed, or "
            f"CUDA_VISIBLE_DEVICES has changed (it is {os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')!r} here). "
            "Look at nvidia-smi, and restart the kernel so that it counts again"
        )


_begun_with: list[str | None] = []
"""CUDA_VISIBLE_DEVICES when CUDA was initialised in this process."""


def _check_that_cuda_sees(here: int) -> None:
    """Raise RuntimeError if this process, which stays from job to job, has begun with other GPUs than it is to use."""
    now = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not torch.cuda.is_initialized():
        _begun_with[:] = [now]
    elif _begun_with and here and _begun_with[0] != now:
        raise RuntimeError(
            f"CUDA_VISIBLE_DEVICES is {now!r} now, and was {_begun_with[0]!r} when this rank began to use its GPU: "
            f"CUDA reads it once. Close the session and make a new one\n{help_hint('gpu')}"
        )


# What gloo cannot do with CUDA tensors


@contextlib.contextmanager
def refusing_over_gloo(settled: Settled | None, rank: int) -> Iterator[None]:
    """Have what gloo would crash on raise RuntimeError in words, where CUDA tensors of this rank go by gloo.

    The problem: gloo takes a CUDA tensor's address for one of the host's. What does not work: to catch it afterwards,
    for the rank is killed by a signal, or blocks. What is done: point-to-point calls of process groups and functional
    collectives look at their tensors first. What still fails: C++ that calls a group without Python.
    """
    if settled is None or settled.device.type != "cuda" or is_nccl(settled.backend):
        yield
        return
    with contextlib.ExitStack() as replaced:
        for owner, name, what in _refused():
            real = getattr(owner, name)
            replaced.callback(setattr, owner, name, real)
            setattr(owner, name, _checked(real, what, rank, settled.device))
        yield


FUNCTIONAL = (
    *("all_gather_into_tensor", "all_gather_into_tensor_coalesced", "all_reduce", "all_reduce_", "all_to_all_single"),
    *("broadcast", "broadcast_", "reduce_scatter_tensor", "reduce_scatter_tensor_coalesced"),
)
"""PyTorch's functional collectives, in whichever version."""


def _refused() -> list[tuple[Any, str, str]]:
    """Return what is looked at: an owner, a name in it, and what it is in a message."""
    group = dist.ProcessGroup
    found: list[tuple[Any, str, str]] = [(group, name, f"dist.{name}") for name in ("send", "recv")]
    found.append((group, "recv_anysource", "dist.recv"))
    functional = torch.ops._c10d_functional
    for name in FUNCTIONAL:
        if hasattr(functional, name):
            what = f"a functional collective ({name}: DTensor, FSDP2 and tensor parallel rest on these)"
            found.append((functional, name, what))
    return found


def _checked(real: Callable[..., Any], what: str, rank: int, device: torch.device) -> Callable[..., Any]:
    @functools.wraps(real)
    def call(*arguments: Any, **options: Any) -> Any:
        for value in (*arguments, *options.values()):
            for tensor in value if isinstance(value, (list, tuple)) else [value]:
                if isinstance(tensor, torch.Tensor) and tensor.is_cuda:
                    raise RuntimeError(
                        f"rank {rank} calls {what} with a tensor on {tensor.device}, but its process group is gloo's, "
                        "which has no CUDA form of it. Use CPU tensors (tensor.cpu()), or launch with a GPU for each "
                        f"rank, or with device='cpu'\n{help_hint('gpu')}"
                    )
        return real(*arguments, **options)

    return call


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
