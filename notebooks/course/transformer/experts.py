"""A mixture of experts in the place of the MLP: each token goes to one of them, if that one has room."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu


class Experts(nn.Module):
    """Several MLPs, of which a router chooses one for each token: Switch (Fedus et al. 2021, arXiv 2101.03961).

    An expert takes at most `capacity` tokens of a sequence, in their order; those that come too late are *dropped*:
    the block adds nothing to them. Room is counted by sequence, so that what is dropped does not depend on which other
    sequences lie on the same rank.
    """

    FACTOR = 1.25
    """Room for so many times as many tokens as would come if all experts were chosen equally often."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.empty(experts, width, 4 * width))
        self.down = nn.Parameter(torch.empty(experts, 4 * width, width))
        self.exchange: Callable[[Tensor, Callable[[Tensor], Tensor]], Tensor] = lambda slots, apply: apply(slots)
        """Brings slots to where their experts are and back: of (batch, experts, capacity, width)."""
        self.bias: Tensor | None = None
        """(experts,): added to the router's probabilities, for the choice only: DeepSeek-V3's way to balance."""
        self.load: Tensor | None = None
        """(experts,): how many tokens chose each expert the last time."""
        self.has_room: Tensor | None = None
        """(batch, time): which tokens found room the last time."""

    @property
    def dropped(self) -> float:
        """Share of the tokens that found no room the last time."""
        return 0.0 if self.has_room is None else 1 - self.has_room.double().mean().item()

    def capacity(self, time: int) -> int:
        """How many tokens of a sequence an expert takes."""
        return math.ceil(self.FACTOR * time / self.router.out_features)

    def apply_experts(self, slots: Tensor) -> Tensor:
        """Return (batch, experts, capacity, width): each expert's MLP on what lies in its slots."""
        hidden = gelu(torch.einsum("becw,ewh->bech", slots, self.up))
        return torch.einsum("bech,ehw->becw", hidden, self.down)

    def forward(self, x: Tensor) -> Tensor:
        """Return (batch, time, width)."""
        batch, time, width = x.shape
        experts, capacity = self.router.out_features, self.capacity(time)
        probabilities = self.router(x).softmax(-1)  # (batch, time, experts)
        chosen = (probabilities if self.bias is None else probabilities + self.bias).argmax(-1)
        gate = probabilities.gather(-1, chosen[..., None])[..., 0]
        queue = torch.nn.functional.one_hot(chosen, experts).cumsum(1)  # how many have come to each expert so far
        self.load = queue[:, -1].sum(0)
        place = queue.gather(2, chosen[..., None])[..., 0] - 1
        self.has_room = has_room = place < capacity
        # One slot more than there is room for: those that come too late go there, and it is cut off.
        slot = chosen * (capacity + 1) + place.clamp(max=capacity)
        index = slot[..., None].expand(-1, -1, width)
        slots = x.new_zeros(batch, experts * (capacity + 1), width).scatter(1, index, x)
        slots = slots.view(batch, experts, capacity + 1, width)[:, :, :capacity]
        found = self.exchange(slots, self.apply_experts)
        found = torch.nn.functional.pad(found, (0, 0, 0, 1)).flatten(1, 2)
        return found.gather(1, index) * (gate * has_room)[..., None]
