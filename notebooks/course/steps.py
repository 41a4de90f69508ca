"""The training loop of the lessons on sharding: take a few steps, and say what a rank holds and what it sends."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

import labkit


class Steps(NamedTuple):
    """What a rank has found out about its steps."""

    held: dict[str, int]
    """Bytes on this rank of "parameters", "gradients" and "optimizer state", after the last step."""
    sent: float
    """Bytes sent per step, from the second step on; NaN where nobody counts them (NCCL)."""
    weights: dict[str, Tensor]
    """The whole weights, on the CPU."""


def batches(train_set: Dataset[Any], batch_size: int, seed: int, device: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield whole batches for ever, the same on every rank: images (float64) and labels."""
    generator = torch.Generator().manual_seed(seed)
    loader = DataLoader(train_set, batch_size, shuffle=True, drop_last=True, generator=generator)
    while True:
        for images, labels in loader:
            yield images.to(device, torch.float64), labels.to(device)


def take_steps(
    worker: Any,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    whole_batches: Iterator[tuple[Tensor, Tensor]],
    steps: int,
    part: int = 0,
    parts: int = 1,
    call: Callable[[Tensor], Tensor] | None = None,
) -> Steps:
    """Train on one part of every batch; return what the rank holds, what it sends, and the weights.

    Args:
        worker: this rank's.
        model: whose weights are returned.
        optimizer: of these weights.
        whole_batches: the same on every rank.
        steps: how many; two at least, as the first one also sets things up and is not counted.
        part: which part of a batch this rank takes, of `parts`.
        parts: into how many parts a batch is cut.
        call: what is called in place of `model`: DDP around it.
    """
    worker.expect(steps)
    before = 0.0
    for step, (images, labels) in enumerate(itertools.islice(whole_batches, steps)):
        if step == 1:
            before = labkit.profiling.bytes_sent()
        loss = cross_entropy((call or model)(images.chunk(parts)[part]), labels.chunk(parts)[part])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        worker.log(loss=loss.item(), samples=len(images) / dist.get_world_size())
    sent = (labkit.profiling.bytes_sent() - before) / (steps - 1)
    weights = {name: gathered(tensor) for name, tensor in model.state_dict().items()}
    return Steps(labkit.profiling.tensor_bytes(model, optimizer), sent, weights)


def gathered(tensor: Tensor) -> Tensor:
    """Return the whole of a tensor on the CPU, also of one of which each rank has a part."""
    from torch.distributed.tensor import DTensor

    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().cpu().clone()


def difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Return the greatest difference of any weight, NaN if one is NaN."""
    assert one.keys() == other.keys(), "two networks with the same parameters"
    return torch.stack([(one[name] - other[name]).abs().max() for name in one]).max().item()
