"""Recomputation: blocks keep only what they were given, and compute the rest once more (Chen et al. 2016)."""

from __future__ import annotations

import functools

from torch import nn
from torch.utils.checkpoint import checkpoint

from course.transformer.ddp import DDP
from course.transformer.gpt import GPT


class Recomputation(DDP):
    """PyTorch's `checkpoint` around every block, in DDP. Memory for time: about a third more computing."""

    title = "DDP, recomputed"

    def cut(self, network: GPT) -> nn.Module:
        """Wrap the blocks, then the network."""
        for block in network.blocks.values():
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
        return super().cut(network)
