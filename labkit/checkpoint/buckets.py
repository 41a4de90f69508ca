"""The order in which DDP cuts its buckets, which a run that goes on must have from the beginning."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel


class BucketOrder:
    """In which order the first backward pass makes the gradients of a DDP model ready.

    By that order DDP cuts its buckets anew, once. From three ranks on, sums depend in the last bit on where in a bucket
    a gradient lies, so that a resumed run must begin with the buckets that the interrupted one had. See
    https://docs.pytorch.org/docs/stable/notes/ddp.html#internal-design.
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        self._model = model
        self._parameters = {name: p for name, p in model.module.named_parameters() if p.requires_grad}
        self._names: list[str] = []
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(functools.partial(self._note, name))
            for name, parameter in self._parameters.items()
        ]

    def _note(self, name: str, parameter: Tensor) -> None:
        if len(self._names) < len(self._parameters):
            self._names.append(name)

    def settled(self) -> list[str]:
        """Return the parameters' names in that order; empty before the first backward pass is over."""
        if len(self._names) < len(self._parameters):
            return []
        while self._hooks:
            self._hooks.pop().remove()
        return self._names

    def repeat(self, names: list[str]) -> None:
        """Let a backward pass of zeros make gradients ready in that order; called by all ranks. Changes no weight."""
        if not names or self._names:
            return
        gradients = [parameter.grad for parameter in self._parameters.values()]
        network = self._model.module
        self._model.module = _Zeros(network, [self._parameters[name] for name in names])
        try:
            self._model().backward()
        finally:
            self._model.module = network
        for parameter, gradient in zip(self._parameters.values(), gradients, strict=True):
            parameter.grad = gradient


class _Zeros(torch.nn.Module):
    """Stands in for a network and gives zero, made of its parameters such that their gradients come in their order."""

    def __init__(self, network: torch.nn.Module, parameters: list[Tensor]) -> None:
        super().__init__()
        self.network = network  # DDP broadcasts its buffers
        self._parameters_in_order = parameters

    def forward(self) -> Tensor:
        """Use the first parameter last: backward, it comes first."""
        return sum((p * 0).sum() for p in reversed(self._parameters_in_order))  # type: ignore[return-value]


def cuts_buckets_anew(thing: Any) -> bool:
    """Whether a thing is a DDP model that does so after its first backward pass."""
    return isinstance(thing, DistributedDataParallel) and not (thing.find_unused_parameters or thing.static_graph)
