"""Pretended GPUs: every device is the CPU, but PyTorch says `cuda:0`, and refuses what CUDA, NCCL and gloo refuse.

    with pretended_gpu.machine(2, tmp_path / "calls") as calls:      # two GPUs, in every process begun inside
        labkit.launch(train, world_size=2)
    calls()                                                           # what each process did with CUDA

It is switched on by an environment variable, `LABKIT_PRETENDED_GPUS`, which `site/sitecustomize.py` on `PYTHONPATH`
looks for: so kernels, ranks and a DataLoader's workers have it, however they are started, and a process has it only if
it was started inside. Three modules:

    devices     `torch.cuda`: counting, initialising, the current device, memory, streams that do nothing
    tensors     which device a tensor is on: a mark on its storage, kept by two modes in every thread
    groups      NCCL, which is gloo that refuses CPU tensors; gloo, which fails on CUDA tensors that are sent

What is pretended: devices of tensors, also in threads and in autograd's hooks (a CPU backward pass runs in the thread
that calls it); "Expected all tensors to be on the same device"; `.numpy()` of a CUDA tensor; a CPU generator for a CUDA
tensor; CUDA's lazy initialisation by PyTorch's own code, with the calls it has queued; `CUDA_VISIBLE_DEVICES`; "invalid
device ordinal"; a device-side assert that breaks the context
(`LABKIT_PRETENDED_ASSERT=1`: an index out of range on a CUDA tensor); "No backend type associated with device type cpu"
for NCCL alone; two ranks of one NCCL group on one GPU; point to point and functional collectives of CUDA tensors over
gloo; files and pickles that remember a device.

What is not, so that only a GPU can decide it:

    time         a device is as fast as the CPU, and nothing runs beside the host: no overlap, no waiting for a kernel
    numerics     float32 is the CPU's: no TF32, no other order of sums, no non-deterministic kernel, no half precision
    streams      all are one: a missing synchronisation, a buffer used too early, a hang in a kernel are not seen
    memory       figures are the number of bytes marked, never out of memory; contexts cost nothing
    kernels      the profiler sees none; NCCL's watchdog, abort and flight recorder are gloo's or missing
    splitting    a mesh's groups are made one after the other, not by ncclCommSplit of a communicator that is there
    compilers    `torch.compile`, CUDA graphs, Triton
    C++          what calls CUDA without Python (`torch.cuda.comm`, IPC), or has a kernel for CUDA alone
                 (`nn.SyncBatchNorm`), is missing. A tensor that C++ makes for itself has no mark until it meets one
    gloo         really passes a device's address to the socket: the rank may die by a signal. Here it raises
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

DEVICES, LOG = "LABKIT_PRETENDED_GPUS", "LABKIT_PRETENDED_LOG"
SITE = Path(__file__).parent / "site"
ROOT = Path(__file__).parent.parent.parent


def environment(devices: int, log: Path | None = None, **more: str) -> dict[str, str]:
    """Return the variables with which a process finds so many GPUs."""
    path = [str(SITE), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    found = {DEVICES: str(devices), "PYTHONPATH": os.pathsep.join(dict.fromkeys(path)), **more}
    return found | ({LOG: str(log)} if log else {})


@contextlib.contextmanager
def machine(devices: int, log: Path, **more: str) -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """Have processes that are started inside find so many GPUs; gives a function that returns what they recorded.

    This process has none: it counts `devices` if it asks, and initialises nothing.
    """
    before = dict(os.environ)
    os.environ.update(environment(devices, log, **more))
    try:
        yield lambda: recorded(log)
    finally:
        os.environ.clear()
        os.environ.update(before)


def recorded(log: Path) -> list[dict[str, Any]]:
    """Return what processes have recorded in a file: `what`, `pid`, `parent`, `rank` where there is one, and details.

    `what` is "initialise", "set_device", "context" (of the `device`), "init_process_group" or "communicator".
    """
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def is_on() -> bool:
    """Whether this process is to find pretended GPUs."""
    return bool(os.environ.get(DEVICES))


def install() -> None:
    """Pretend in this process, which has just imported torch."""
    from tests.pretended_gpu import devices, groups, tensors

    devices.install()
    tensors.install()
    groups.install()
