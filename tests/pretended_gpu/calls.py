"""A notebook on pretended GPUs, as a program: makes calls and prints, as JSON, what came of each.

python -m tests.pretended_gpu.calls FOLDER        in `pretended_gpu.environment(…)`
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import labkit
from tests.pretended_gpu import recorded
from tests.support import prefork

CALLS: dict[str, Any] = {}
GPUS = torch.cuda.device_count()


def call(function: Any) -> Any:
    """Have the program make this call."""
    CALLS[function.__name__] = function
    return function


def where(worker: Any) -> dict[str, Any]:
    """Reduce a tensor on the rank's device and one on the CPU, and say where that was."""
    on_device, on_cpu = torch.ones(2, device=worker.device), torch.ones(2)
    dist.all_reduce(on_device)
    dist.all_reduce(on_cpu)
    assert on_device.tolist() == on_cpu.tolist() == [worker.world_size] * 2
    return {
        "device": str(on_device.device),
        "backend": dist.get_backend(),
        "sees": torch.cuda.device_count(),
        "local rank": os.environ["LOCAL_RANK"],
        "current": torch.cuda.current_device() if worker.device.type == "cuda" else None,
    }


def as_script(worker: Any) -> list[str]:
    """What a script for torchrun does: it finds its GPU by itself."""
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    x = torch.ones(1, device="cuda" if torch.cuda.is_available() else "cpu")
    dist.all_reduce(x)
    return [str(x.device), str(x.item())]


def ran(function: Any, *arguments: Any, **options: Any) -> dict[str, Any]:
    """Launch a function, and return what there is to know of the run."""
    run = labkit.launch(function, *arguments, **options, live=False, wait=False)
    run.over.wait()
    return {
        "results": run.results,
        "devices": run.devices,
        "placement": run.placement,
        "pids": run.pids,
        "error": str(run.error) if run.error else "",
        "output": "".join(run.output),
        "peak": run.peak_device_bytes,
    }


@call
def by_default() -> Any:
    """A rank for each GPU."""
    return ran(where)


@call
def too_many_ranks() -> Any:
    """Twice as many as there are GPUs."""
    return ran(where, world_size=2 * GPUS)


@call
def sharing() -> Any:
    """As many, which share the GPUs because they are to."""
    return ran(where, world_size=2 * GPUS, device="cuda")


@call
def on_the_cpu() -> Any:
    """Ranks that are not to use a GPU, though there are."""
    return ran(where, world_size=1, device="cpu")


@call
def as_under_torchrun() -> Any:
    """A script's own set-up, on GPUs and without."""
    return [ran(as_script), ran(as_script, world_size=2 * GPUS)]


def out_of_range(worker: Any) -> float:
    """Look up what an embedding does not have, on the last rank."""
    layer = nn.Embedding(4, 2).to(worker.device)
    at = 5 if worker.rank == worker.world_size - 1 else 1
    return layer(torch.tensor([at], device=worker.device)).sum().item()


def moves(worker: Any) -> float:
    """Hold a mebibyte on each GPU that the rank sees."""
    held = [torch.ones(2**18, device=f"cuda:{index}") for index in range(torch.cuda.device_count())]
    return sum(float(one.sum()) for one in held)


@call
def reserved() -> Any:
    """A session: what it does after a kernel has failed, and with its memory."""
    with labkit.Session(GPUS) as ranks:
        first = ran(where, on=ranks)
        failed = ran(out_of_range, on=ranks)
        again = ran(where, on=ranks)
        held = ran(moves, on=ranks)
        ranks.run("x = torch.ones(2, device=worker.device); dist.all_reduce(x)")
        cells = ranks.values("[str(x.device), x.tolist()]")
    with labkit.Session(2 * GPUS) as ranks:
        one, all_ = ran(where, on=ranks, world_size=1), ran(where, on=ranks)
    return {"first": first, "failed": failed, "again": again, "held": held, "cells": cells, "of many": [one, all_]}


def main() -> None:
    """Make all calls."""
    folder = Path(sys.argv[1])
    found: dict[str, Any] = {}
    with prefork.in_use():
        for name, call in CALLS.items():
            try:
                found[name] = call()
            except BaseException:
                found[name] = {"raised": traceback.format_exc()}
    found["initialised here"] = torch.cuda.is_initialized()
    found["calls"] = recorded(Path(os.environ["LABKIT_PRETENDED_LOG"]))
    found["pid"] = os.getpid()
    (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
