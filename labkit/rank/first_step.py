"""What a rank's first step needs, done while the rank has no work."""

from __future__ import annotations

import torch


def warm_up() -> None:
    """Import what an optimizer needs, half of the compiler, and take the first faults of a first step."""
    weight = torch.nn.Parameter(torch.zeros(8, 8))  # not a layer: that would draw random numbers
    optimizer = torch.optim.SGD([weight], lr=0.0)
    torch.nn.functional.linear(torch.zeros(4, 8), weight).sum().backward()
    optimizer.step()
