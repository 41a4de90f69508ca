"""Gradients averaged after the backward pass, without DDP: one all-reduce each, or all in one flat buffer."""

from __future__ import annotations

import torch
import torch.distributed as dist

from course.strategies.base import DataParallelStrategy


class ManualAllReduce(DataParallelStrategy):
    """One all-reduce per parameter (https://docs.pytorch.org/tutorials/intermediate/dist_tuto.html)."""

    title = "manual all-reduce"

    def communicate(self) -> None:
        """Replace every gradient by its mean over the ranks."""
        with self.clock("communication"):
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= self.worker.world_size


class OneBuffer(DataParallelStrategy):
    """All gradients copied into one flat buffer, averaged by one all-reduce, and copied back."""

    title = "one flat buffer"

    def communicate(self) -> None:
        """Replace every gradient by its mean over the ranks."""
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        with self.clock("communication"):
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            dist.all_reduce(flat)
            flat /= self.worker.world_size
            for gradient, mean in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
                gradient.copy_(mean.view_as(gradient))
