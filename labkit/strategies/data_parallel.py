"""`nn.DataParallel`: one process, the batch cut over several devices; on CPU its four steps in threads."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn

from labkit.profiling import counted_too
from labkit.strategies.base import Strategy


class DataParallel(Strategy):
    """Scatter the batch, replicate the network, apply the copies in threads, gather the outputs.

    `nn.DataParallel` itself on two or more GPUs (https://docs.pytorch.org/docs/stable/generated/torch.nn.DataParallel.html).
    On fewer a stand-in with the same four steps, as `torch.nn.parallel.replicate` refuses the CPU.
    """

    title = "DataParallel" if torch.cuda.device_count() >= 2 else "DataParallel (threads)"
    DEVICES = 2

    def prepare(self, network: nn.Module) -> nn.Module:
        """Wrap the network where there are GPUs for it."""
        self._wrapped = nn.DataParallel(network) if torch.cuda.device_count() >= 2 else None
        return network

    def forward(self, inputs: Tensor) -> Tensor:
        """Do the four steps."""
        if self._wrapped is not None:
            outputs: Tensor = self._wrapped(inputs)
            return outputs
        pieces = inputs.chunk(self.DEVICES)
        with self.clock("communication"):
            copies = [replica(self.model) for _ in pieces]

        def apply(twin: nn.Module, piece: Tensor) -> Tensor:
            with counted_too():
                outputs: Tensor = twin(piece)
                return outputs

        with ThreadPoolExecutor(self.DEVICES) as threads:
            gathered = list(threads.map(apply, copies, pieces))
        with self.clock("communication"):
            return torch.cat(gathered)


def replica(network: nn.Module) -> nn.Module:
    """Copy a network so that gradients of the copy's weights add up in the original's."""
    twin = copy.deepcopy(network)
    for path, parameter in network.named_parameters():
        parent_path, _, name = path.rpartition(".")
        parent = twin.get_submodule(parent_path)
        del parent._parameters[name]
        setattr(parent, name, parameter.clone())
    return twin
