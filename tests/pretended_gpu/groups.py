"""Process groups of pretended devices: NCCL is gloo for CUDA tensors only; gloo refuses what it would crash on."""

from __future__ import annotations

import functools
import os
import socket
import sys
from typing import Any

import torch

from tests.pretended_gpu import devices

NO_BACKEND = "No backend type associated with device type {}"
POINT_TO_POINT = ("send", "recv_", "recv_any_source_")
DUPLICATE = (
    "NCCL error in: NCCLUtils.cpp, invalid usage (run with NCCL_DEBUG=WARN for details), NCCL version 2.27.3\n"
    "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\nLast error:\n"
    "Duplicate GPU detected : rank {} and rank {} both on CUDA device {}"
)


def refuse(name: str, arguments: Any, tensors: list[torch.Tensor]) -> None:
    """Raise what a backend raises, or in whose stead it crashes, for these tensors."""
    from tests.pretended_gpu.tensors import device_of

    if name in ("wait_tensor", "barrier", "monitored_barrier_", "_allreduce_mut", "_wrap_tensor_autograd"):
        return
    kinds = {device for tensor in tensors if (device := device_of(tensor)) is not None}
    backends = _backends(name, arguments)
    for device in kinds:
        backend = backends.get(device.type)
        if backend is None:
            raise RuntimeError(NO_BACKEND.format(device.type))
        if backend == "nccl":
            _meet(arguments, device)
        if device.type == "cuda":
            torch.cuda._lazy_init()
            devices.check()
            if backend == "gloo" and name in POINT_TO_POINT:
                raise RuntimeError("[pretended] writev [127.0.0.1]:0: Bad address")
            if backend == "gloo" and not name.endswith("_") and name not in POINT_TO_POINT:
                raise RuntimeError(f"[pretended] {name} of a CUDA tensor over gloo: the rank would crash")


def _group(arguments: Any) -> Any:
    from torch.distributed import ProcessGroup
    from torch.distributed import distributed_c10d as c10d

    for argument in arguments:
        if isinstance(argument, torch.ScriptObject):
            try:
                return ProcessGroup.unbox(argument)
            except RuntimeError:
                continue
        if isinstance(argument, ProcessGroup):
            return argument
    names = [argument for argument in arguments if isinstance(argument, str)]
    return c10d._resolve_process_group(names[-1]) if names else c10d._get_default_group()


def _backends(name: str, arguments: Any) -> dict[str, str]:
    """The backend of each type of device, as the group was made."""
    from torch.distributed import distributed_c10d as c10d

    world, group = c10d._world, _group(arguments)
    config = next((str(c) for g, c in world.pg_backend_config.items() if g == group), None)
    if config is None:
        return {"cpu": "gloo", "cuda": "nccl"}
    return dict(part.split(":") for part in config.split(",")) if ":" in config else {"cpu": config, "cuda": config}


_met: set[str] = set()


def _meet(arguments: Any, device: torch.device) -> None:
    """Make NCCL's communicator of a group when it is first used: ranks on one GPU cannot."""
    group = _group(arguments)
    name = group.group_name
    if name in _met:
        return
    _met.add(name)
    _say_where(group, device)


def _say_where(group: Any, device: torch.device) -> None:
    from torch.distributed import distributed_c10d as c10d

    devices.record("communicator", device=device.index, ranks=group.size())
    if (store := c10d._world.pg_map.get(group, (None, None))[1]) is None or group.size() == 1:
        return
    mine = f"{socket.gethostname()} {os.environ.get('CUDA_VISIBLE_DEVICES', '')} {device.index}"
    store.set(f"pretended/{group.rank()}", mine)
    others = [store.get(f"pretended/{rank}").decode() for rank in range(group.size())]
    for rank, other in enumerate(others):
        if rank != group.rank() and other == mine:
            raise torch.distributed.DistBackendError(DUPLICATE.format(group.rank(), rank, device.index))


def install() -> None:
    """Replace NCCL's backend, and record the groups that are made."""
    if not torch.distributed.is_available():
        return
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    def pretended(real: Any) -> Any:
        class PretendedNCCL:
            """Makes gloo's backend where NCCL's is asked for."""

            Options = real.Options

            def __new__(cls, store: Any, rank: int, size: int, options: Any = None, *_: Any, **__: Any) -> Any:
                if not devices.visible():
                    raise ValueError("ProcessGroupNCCL is only supported with GPUs, no GPUs found!")
                timeout = getattr(options, "_timeout", c10d.default_pg_timeout)
                return c10d.ProcessGroupGloo(store, rank, size, timeout=timeout)

        return PretendedNCCL

    for name in ("ProcessGroupNCCL", "ProcessGroupNCCL2", "ProcessGroupNCCLLazy"):
        if hasattr(c10d, name):
            setattr(c10d, name, pretended(getattr(c10d, name)))
    dist.is_nccl_available = c10d.is_nccl_available = lambda: True

    register = dist.ProcessGroup._register_backend

    def _register_backend(self: Any, device: Any, kind: Any, backend: Any = None) -> None:
        """To C++ every tensor is on the CPU: there must be a backend."""
        gloo = dist.ProcessGroup.BackendType.GLOO
        register(self, device, kind, backend)
        if device.type == "cuda" and not _has_cpu(self):
            register(self, torch.device("cpu"), gloo, backend)

    dist.ProcessGroup._register_backend = _register_backend
    device_types = dist.ProcessGroup._device_types

    def _device_types(self: Any) -> list[torch.device]:
        config = next((str(c) for g, c in c10d._world.pg_backend_config.items() if g is self), "cpu:")
        return [device for device in device_types.__get__(self) if f"{device.type}:" in config]

    dist.ProcessGroup._device_types = property(_device_types)
    set_default = dist.ProcessGroup._set_default_backend

    def _set_default_backend(self: Any, kind: Any) -> None:
        gloo, nccl = dist.ProcessGroup.BackendType.GLOO, dist.ProcessGroup.BackendType.NCCL
        set_default(self, gloo if kind == nccl else kind)

    dist.ProcessGroup._set_default_backend = _set_default_backend
    barrier = dist.ProcessGroup.barrier

    def on_the_cpu(self: Any, *arguments: Any, **options: Any) -> Any:
        for value in (*arguments, *options.values()):
            if isinstance(value, dist.BarrierOptions):
                value.device, value.device_ids = torch.device("cpu"), []
        return barrier(self, *arguments, **options)

    dist.ProcessGroup.barrier = on_the_cpu
    c10d._get_split_source = lambda *_: None

    def split_group(parent: Any = None, split_ranks: Any = None, timeout: Any = None, **options: Any) -> Any:
        """As ncclCommSplit, which makes all groups of a mesh's dimension at once."""
        options.pop("parent_pg", None)
        made = {tuple(ranks): dist.new_group(list(ranks), timeout=timeout) for ranks in split_ranks}
        return next((group for ranks, group in made.items() if dist.get_rank() in ranks), None)

    dist.split_group = c10d.split_group = split_group
    if mesh := sys.modules.get("torch.distributed.device_mesh"):
        vars(mesh)["split_group"] = split_group
    # Since 2.15 modes may take collectives; they would be called twice, by whatever name stands for them by then.
    for name in ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"):
        if hasattr(c10d, name):
            setattr(c10d, name, lambda *_: False)
    init = c10d.init_process_group

    @functools.wraps(init)
    def init_process_group(*arguments: Any, **options: Any) -> Any:
        device = options.get("device_id")
        devices.record(
            "init_process_group",
            backend=str(arguments[0] if arguments else options.get("backend")),
            device_id=None if device is None else str(device),
            initialised=torch.cuda.is_initialized(),
            current=devices.current(),
        )
        _met.clear()
        init(*arguments, **options)
        if device is not None and device.type == "cuda":
            group = c10d._get_default_group()
            devices.use(device.index)
            _met.add(group.group_name)
            if "nccl" in str(c10d._world.pg_backend_config[group]):
                _say_where(group, device)

    dist.init_process_group = c10d.init_process_group = init_process_group


def _has_cpu(group: Any) -> bool:
    try:
        group._get_backend(torch.device("cpu"))
    except RuntimeError:
        return False
    return True
