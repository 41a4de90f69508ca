"""What forward passes keep for the backward pass, counted on tensors that have a shape and no memory.

PyTorch's `FakeTensorMode` runs every operator for the shapes only, and autograd saves what it would save; hooks count
that (https://docs.pytorch.org/docs/stable/autograd.html#saved-tensors-hooks-doc).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from course.scaling.schedules import Kept
from labkit.steps.counting import Activations, local


@contextlib.contextmanager
def fake(dtype: torch.dtype) -> Iterator[None]:
    """Give tensors that are made inside no memory; those of real numbers have `dtype` unless another is said."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # takes a second to import

    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        # What a module keeps outside of parameters and buffers, such as a table of positions, is real.
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield
    finally:
        torch.set_default_dtype(before)


def kept(model: nn.Module, forward: Callable[[], Any]) -> int:
    """Return the bytes that a forward pass keeps for the backward pass, the weights of `model` excluded.

    A storage counts once. Nothing is computed inside `fake`.
    """
    with Activations(model.parameters()) as counted:
        result = forward()
    del result
    return counted.most


def kept_in_halves(model: nn.Module, inputs: Tensor, forward: Callable[[], Tensor]) -> Kept:
    """Return what a stage of a pipeline keeps whose backward pass is in two halves, as PyTorch (2.15) has them.

    The first half, for the gradient of `inputs`, keeps what the second needs: all below the last layer with weights,
    and, of each layer with weights, the gradient of its output. The gradients that a stage receives count as messages.
    """
    from torch.distributed.pipelining._backward import stage_backward_input

    with Activations(model.parameters()) as counted:
        outputs = forward()
        if not inputs.requires_grad:  # the first stage, of which nothing is done before the second half
            between = counted.now
            return Kept(between, between, between)
        received = None if outputs.dim() == 0 else [torch.empty_like(outputs)]
        groups = stage_backward_input([outputs], received, [inputs], model.parameters())[1]
        between = counted.now
        grads = (grad for group in groups for of_layer in group["grads"] for grad in of_layer if grad is not None)
        storages = {storage._cdata: storage.nbytes() for storage in (local(grad).untyped_storage() for grad in grads)}
        for other in counted.kept:
            storages.pop(other, None)
        for message in received or ():
            storages.pop(message.untyped_storage()._cdata, None)
    gradients = sum(storages.values())
    return Kept(counted.most, counted.most + gradients, between + gradients)


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
