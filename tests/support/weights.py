"""The weights of a network, put together from what its ranks return, and how far two networks are apart."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor


def whole_weights(ranks: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return all weights that ranks have returned by the whole network's names: a stage's each, or all of them."""
    return {name: tensor for each in ranks for name, tensor in each.items()}


def difference(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """Return the greatest difference of any weight, NaN if one is NaN. Both must have the same weights."""
    assert one.keys() == other.keys()
    return torch.stack([(one[name].cpu() - other[name].cpu()).abs().max().double() for name in one]).max().item()
