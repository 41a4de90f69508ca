"""What a forward pass keeps for the backward pass, without computing it: on tensors that have a shape and no memory.

PyTorch's `FakeTensorMode` runs every operator for the shapes only, and autograd saves what it would save; hooks count
that (https://docs.pytorch.org/docs/stable/autograd.html#saved-tensors-hooks-doc).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from labkit.profiling import activations


@contextlib.contextmanager
def fake(dtype: torch.dtype) -> Iterator[None]:
    """Give tensors that are made inside no memory; those of real numbers have `dtype` unless another is said."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # takes a second to import

    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with FakeTensorMode():
            yield
    finally:
        torch.set_default_dtype(before)


def kept(model: nn.Module, forward: Callable[[], Any]) -> int:
    """Return the bytes that a forward pass keeps for the backward pass, the weights of `model` excluded.

    A storage counts once. Nothing is computed inside `fake`.
    """
    with activations(model) as counted:
        result = forward()
    del result
    return counted["activations"]


class KeepInput(torch.autograd.Function):
    """A block that is recomputed: of its forward pass, its input is all that is kept (Chen et al. 2016)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return something of the shape of a block's output."""
        ctx.save_for_backward(x)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Never called: nothing is computed here."""
        raise AssertionError("nothing is computed here")
