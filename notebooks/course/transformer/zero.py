"""ZeRO-1: DDP whose optimizer keeps its state for a part of the parameters on each rank (Rajbhandari et al. 2020)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from course.strategies.sharding import zero_redundancy
from course.transformer.base import ring
from course.transformer.ddp import DDP
from labkit.steps.counting import size_bytes


class ZeRO1(DDP):
    """PyTorch's `ZeroRedundancyOptimizer`: each rank steps its parameters and broadcasts them."""

    title = "ZeRO-1"

    def make_optimizer(self, optimizer: Callable[..., torch.optim.Optimizer]) -> torch.optim.Optimizer:
        """Shard the optimizer, which must be a `functools.partial` of its class."""
        return zero_redundancy(self.model, optimizer)

    def bytes_expected(self, batch_size: int) -> float:
        """Return DDP's, and every parameter once from its owner to n − 1 ranks: the mean over ranks."""
        parameters = size_bytes(self.network.parameters())
        return super().bytes_expected(batch_size) + ring(self.worker.world_size) * parameters
