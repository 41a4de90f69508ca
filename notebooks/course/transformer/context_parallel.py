"""Context parallel: each rank has a part of every sequence, in all layers; attention goes round in a ring."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from course.transformer.ddp import DDP
from course.transformer.gpt import GPT, Attention
from course.transformer.ring_attention import RingAttention


class ContextParallel(DDP):
    """The sequence cut into 2 n pieces; rank r has piece r and piece 2 n − 1 − r.

    Late positions see more keys than early ones; so every rank has as much to compute as any other. Gradients are
    averaged as in DDP.
    """

    title = "context parallel"
    halves: ClassVar[bool] = True

    def cut(self, network: GPT) -> nn.Module:
        """Have attention ask the other ranks."""
        self.ring = RingAttention()
        for attention in (module for module in network.modules() if isinstance(module, Attention)):
            attention.attend = self.ring
        return super().cut(network)

    def samples(self, batch_size: int) -> Tensor:
        """Return all."""
        return torch.arange(batch_size)

    def positions(self, time: int) -> Tensor:
        """Return the rank's two pieces of the sequence."""
        return self.positions_of(self.worker.rank, time)

    def positions_of(self, rank: int, time: int) -> Tensor:
        """Return those of a rank. Raises ValueError if the sequence cannot be cut so."""
        parts = self.worker.world_size * (2 if self.halves else 1)
        if time % parts:
            raise ValueError(f"a sequence of {time} cannot be cut into {parts} equal parts; take a multiple of {parts}")
        chunks = torch.arange(time).chunk(parts)
        return torch.cat([chunks[rank], chunks[parts - 1 - rank]]) if self.halves else chunks[rank]

    def set_place(self, inputs: Tensor) -> None:
        """Tell attention, too, where each rank's part lies."""
        super().set_place(inputs)
        all_ranks = range(self.worker.world_size)
        self.ring.positions = [self.positions_of(r, inputs.shape[1]).to(inputs.device) for r in all_ranks]


class ContextParallelInOrder(ContextParallel):
    """The sequence cut into n pieces, one each: the first rank has least to do, the last most."""

    title = "context parallel, in order"
    halves = False
