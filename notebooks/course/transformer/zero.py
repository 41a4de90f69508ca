"""ZeRO-1: DDP whose optimizer keeps its state for a part of the parameters on each rank (Rajbhandari et al. 2020)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from course.transformer.ddp import DDP


class ZeRO1(DDP):
    """PyTorch's `ZeroRedundancyOptimizer`: each rank steps its parameters and broadcasts them."""

    title = "ZeRO-1"

    def make_optimizer(self, optimizer: Callable[..., torch.optim.Optimizer]) -> torch.optim.Optimizer:
        """Shard the optimizer, which must be a `functools.partial` of its class."""
        from torch.distributed.optim import ZeroRedundancyOptimizer

        kind: Any = optimizer
        return ZeroRedundancyOptimizer(self.model.parameters(), optimizer_class=kind.func, **kind.keywords)
