"""`nn.DataParallel`: one process, the batch cut over several devices; on CPU its four steps in threads."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from course.strategies.base import Strategy
from labkit.comparison.program import compute_on, note_copy


class ThreadedDataParallel(nn.Module):
    """`nn.DataParallel`'s four steps on the CPU, in threads: scatter, replicate, apply, gather.

    A stand-in: `torch.nn.parallel.replicate` refuses the CPU, and `nn.DataParallel` there calls the bare network. As
    there, device 0 computes with the network itself, so that BatchNorm's statistics are those of its part of the batch.

    Args:
        module: the network; (n, …) inputs → (n, …) outputs.
        devices: how many parts the batch is cut into, with a copy of the network and a thread each.
        marking: called as `with marking("communication"):` around what would be copied between devices.
    """

    def __init__(
        self,
        module: nn.Module,
        devices: int = 2,
        marking: Callable[[str], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,  # type: ignore[assignment]
    ) -> None:
        super().__init__()
        self.module = module
        self._devices, self._marking = devices, marking

    def forward(self, inputs: Tensor) -> Tensor:
        """Do the four steps."""
        pieces = inputs.chunk(self._devices)
        with self._marking("communication"):
            for device, piece in enumerate(pieces):
                note_copy([piece], 0, device)
            copies = replicate(self.module, len(pieces))
        with ThreadPoolExecutor(self._devices) as threads:
            outputs = list(threads.map(compute_on, range(len(pieces)), copies, pieces))
        with self._marking("communication"):
            return torch.cat([Gather.apply(output, device) for device, output in enumerate(outputs)])


class Gather(torch.autograd.Function):
    """Copy outputs to device 0, and their gradients back."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, device: int) -> Tensor:
        """Return the output on device 0."""
        ctx.device = device
        note_copy([output], device, 0)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Return the gradient on the output's device."""
        note_copy([gradient], 0, ctx.device)
        return gradient, None


class Broadcast(torch.autograd.Function):
    """Copy weights to the other devices, and add the gradients up on device 0 once all of them are there."""

    @staticmethod
    def forward(ctx: Any, devices: int, *weights: Tensor) -> tuple[Tensor, ...]:
        """Return the weights of device 1, of device 2, …"""
        ctx.devices = devices
        for device in range(1, devices):
            note_copy(weights, 0, device)
        return tuple(weight.clone() for _ in range(1, devices) for weight in weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the sums."""
        count = len(gradients) // (ctx.devices - 1)
        by_device = [gradients[start : start + count] for start in range(0, len(gradients), count)]
        for device, own in enumerate(by_device, 1):
            note_copy(own, device, 0)
        return None, *(torch.stack(one).sum(0) for one in zip(*by_device, strict=True))


class DataParallel(Strategy):
    """Scatter the batch, replicate the network, apply the copies in threads, gather the outputs.

    `nn.DataParallel` itself on two or more GPUs (https://docs.pytorch.org/docs/stable/generated/torch.nn.DataParallel.html),
    on fewer the stand-in.
    """

    title = "DataParallel" if torch.cuda.device_count() >= 2 else "DataParallel (threads)"

    def prepare(self, network: nn.Module) -> nn.Module:
        """Wrap the network."""
        self._wrapped: nn.Module = (
            nn.DataParallel(network)
            if torch.cuda.device_count() >= 2
            else ThreadedDataParallel(network, marking=self.clock)
        )
        return network

    def forward(self, inputs: Tensor) -> Tensor:
        """Do the four steps."""
        outputs: Tensor = self._wrapped(inputs)
        return outputs


def replicate(network: nn.Module, devices: int) -> list[nn.Module]:
    """Return the network itself for device 0, and copies whose weights' gradients add up in its own."""
    names = dict(network.named_parameters(remove_duplicate=False))  # a tied weight has several
    weights = list(network.parameters())
    copied = Broadcast.apply(devices, *weights) if devices > 1 else ()
    made = [network]
    for device in range(1, devices):
        note_copy(network.buffers(), 0, device)
        twin = copy.deepcopy(network, {id(weight): weight for weight in weights})
        own = copied[(device - 1) * len(weights) : device * len(weights)]
        of = {id(weight): copy_ for weight, copy_ in zip(weights, own, strict=True)}
        for name, weight in names.items():
            path, _, last = name.rpartition(".")
            parent = twin.get_submodule(path)
            del parent._parameters[last]
            setattr(parent, last, of[id(weight)])
        made.append(twin)
    return made
