"""Mixed precision: products of 16 bits, weights of 32 (Micikevicius et al. 2017; bfloat16: Kalamkar et al. 2019)."""

from __future__ import annotations

import torch
from torch import Tensor

from labkit.transformer.ddp import DDP


class BF16(DDP):
    """PyTorch's `autocast` to bfloat16 around the forward pass, in DDP.

    In 16 bits: what linear layers and attention multiply, and what they give. In 32: weights, gradients, optimizer
    state, what is averaged, norms, residual sums, and the loss. Not quite the same step.
    """

    title = "DDP, bf16 autocast"
    exact = False

    BOUND = 0.1
    """How far off the weights are after a few steps, at most, as a share of the way that they have gone (2-norms).

    bfloat16 has 8 bits of mantissa: each rounding is off by at most 2⁻⁹, 0.2 %. A gradient of d blocks has gone through
    about 12 d of them in series, forward and back; they are independent, so √(12 d) · 0.2 %, 1.4 % with four blocks.
    Adam divides by the gradient's size, so entries that are small among their batch's noise move as far as great ones,
    with a larger error: hence a bound several times that.
    """

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits of 32 bits, of which the loss is computed."""
        with torch.autocast(self.worker.device.type, torch.bfloat16):
            outputs: Tensor = self.wrapped(inputs)
        return outputs.float()
