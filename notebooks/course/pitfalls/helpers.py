"""What the exhibits' code imports: small functions, each used by several of them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from course import models
from labkit.rank.worker import Worker


def python(program: str, data: bytes = b"") -> tuple[int, str]:
    """Run a program in a fresh Python; return its exit code, and the last line of its output."""
    done = subprocess.run(
        [sys.executable, "-c", program], input=data, capture_output=True, timeout=60, check=False
    )
    lines = (done.stderr + done.stdout).decode().strip().splitlines()
    return done.returncode, lines[-1] if lines else ""


def part_of(worker: Worker, tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor's rows."""
    return tensor.tensor_split(worker.world_size)[worker.rank]


def add_one(rank: int, weights: Tensor) -> None:
    """Stand for training, on a process that `torch.multiprocessing.spawn` has started."""
    weights += 1


def flat(tensors: Iterable[Tensor]) -> Tensor:
    """Return tensors as one of one dimension."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def spread(tensors: Sequence[Tensor]) -> float:
    """Return the greatest difference to the first of some tensors."""
    return (torch.stack(list(tensors)) - tensors[0]).abs().max().item()


def steps_of(
    model: nn.Module, x: Tensor, y: Tensor, steps: int = 5, state: dict[str, Any] | None = None
) -> torch.optim.Optimizer:
    """Take some steps of SGD with momentum, from the optimizer's state on if one is given. Return the optimizer."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if state:
        optimizer.load_state_dict(state)
    for _ in range(steps):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    return optimizer


def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Return the share of images that a model is right about."""
    with torch.no_grad():
        return (model(images).argmax(1) == labels).float().mean().item()


def ten_orders(values: Tensor, seed: int) -> list[Tensor]:
    """Return values in ten random orders."""
    generator = torch.Generator().manual_seed(seed)
    return [values[torch.randperm(len(values), generator=generator)] for _ in range(10)]


def far_from_one_process(gradient: Tensor, images: Tensor, labels: Tensor) -> float:
    """Return how far a gradient of the first 240 images is from that of one process, relative to its length."""
    torch.manual_seed(0)
    model = models.linear(images[0].numel()).double()
    cross_entropy(model(images[:240].double()), labels[:240]).backward()
    expected = flat(
        parameter.grad for parameter in model.parameters() if parameter.grad is not None
    )
    return ((gradient - expected).norm() / expected.norm()).item()
