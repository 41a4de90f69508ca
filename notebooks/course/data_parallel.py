"""The four steps of `nn.DataParallel` in threads on the CPU."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn


class ThreadedDataParallel(nn.Module):
    """A stand-in for `nn.DataParallel`, which without GPUs calls the bare network: scatter, replicate, apply, gather.

    As there, device 0 computes with the network itself, so that BatchNorm's statistics are those of its part of the
    batch, and what the copies note in their buffers is lost.

    Args:
        module: the network; (n, …) inputs → (n, …) outputs.
        devices: how many parts the batch is cut into, with a copy of the network and a thread each.
    """

    def __init__(self, module: nn.Module, devices: int = 2) -> None:
        super().__init__()
        self.module, self.devices = module, devices

    def forward(self, inputs: Tensor) -> Tensor:
        """Do the four steps."""
        pieces = inputs.chunk(self.devices)
        copies = [self.module, *(replicate(self.module) for _ in pieces[1:])]
        has_grad = torch.is_grad_enabled()  # a thread has a switch of its own

        def apply(network: nn.Module, piece: Tensor) -> Tensor:
            with torch.set_grad_enabled(has_grad):
                outputs: Tensor = network(piece)
                return outputs

        with ThreadPoolExecutor(len(pieces)) as threads:
            return torch.cat(list(threads.map(apply, copies, pieces)))


def replicate(network: nn.Module) -> nn.Module:
    """Return a copy of a network; the gradients of its weights add up in the network's own."""
    copied = {id(weight): weight.clone() for weight in network.parameters()}
    twin = copy.deepcopy(network, {id(weight): weight for weight in network.parameters()})
    for name, weight in network.named_parameters(remove_duplicate=False):  # a tied weight has several names
        path, _, last = name.rpartition(".")
        parent = twin.get_submodule(path)
        del parent._parameters[last]
        setattr(parent, last, copied[id(weight)])
    return twin
