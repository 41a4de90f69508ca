"""Mixed precision: products of 16 bits, weights of 32 (Micikevicius et al. 2017; bfloat16: Kalamkar et al. 2019)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from course.transformer.ddp import DDP


class BF16(DDP):
    """PyTorch's `autocast` to bfloat16 around the forward pass, in DDP.

    In 16 bits: what linear layers and attention multiply, and what they give. In 32: weights, gradients, optimizer
    state, what is averaged, norms, residual sums, and the loss. Not quite the same step.
    """

    title = "DDP, bf16 autocast"
    exact = False

    @staticmethod
    def bound(depth: int) -> float:
        """Return how far off the gradients of `depth` blocks are at most, as a share of their size (2-norms).

        bfloat16 has 8 bits of mantissa: a rounding is off by 2⁻⁹ at most, 0.2 %. A gradient has gone through about 12
        roundings a block, forward and back, one after another; as they are independent, that makes √(12 depth) · 0.2 %
        at most; and twice that is allowed. With SGD it holds for the way that the weights have gone, too; Adam divides
        each entry by its own size, and may move those that are smaller than the error the other way.
        """
        return 2 * 2**-9 * math.sqrt(12 * depth)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits of 32 bits, of which the loss is computed."""
        with torch.autocast(self.worker.device.type, torch.bfloat16):
            outputs: Tensor = self.wrapped(inputs)
        return outputs.float()
