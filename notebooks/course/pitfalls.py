"""What the cells of the two lessons on pitfalls share."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from labkit.rank.worker import Worker


def tried(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function; return what it returns, or its error as one line."""
    try:
        return function(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]


def python(program: str, data: bytes = b"") -> tuple[int, str]:
    """Run a program in a fresh Python; return its exit code, and the last line of its output."""
    done = subprocess.run([sys.executable, "-c", program], input=data, capture_output=True, timeout=300, check=False)
    lines = (done.stderr + done.stdout).decode().strip().splitlines()
    return done.returncode, lines[-1] if lines else ""


def add_one(rank: int, weights: Tensor) -> None:
    """Stand for training, in a process that `torch.multiprocessing.spawn` has started."""
    weights += 1


def part_of(worker: Worker, tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor's rows."""
    return tensor.tensor_split(worker.world_size)[worker.rank]


def flat(tensors: Iterable[Tensor]) -> Tensor:
    """Return tensors as one of one dimension."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def apart(tensors: Sequence[Tensor]) -> float:
    """Return the greatest difference of some tensors to the first."""
    return (torch.stack(list(tensors)) - tensors[0]).abs().max().item()


def steps_of(model: nn.Module, x: Tensor, y: Tensor, steps: int = 5) -> torch.optim.Optimizer:
    """Take some steps of SGD with momentum. Return the optimizer."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    return optimizer
