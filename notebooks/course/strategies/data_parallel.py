"""`nn.DataParallel`: one process, the batch cut over several devices; on CPU its four steps in threads."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn

from labkit import Strategy
from labkit.profiling import counted_too

LESSON = "04"


class ThreadedDataParallel(nn.Module):
    """`nn.DataParallel`'s four steps on the CPU, in threads: scatter, replicate, apply, gather.

    A stand-in: `torch.nn.parallel.replicate` refuses the CPU, and `nn.DataParallel` there calls the bare network.

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
            copies = [replica(self.module) for _ in pieces]

        def apply(twin: nn.Module, piece: Tensor) -> Tensor:
            with counted_too():
                outputs: Tensor = twin(piece)
                return outputs

        with ThreadPoolExecutor(self._devices) as threads:
            gathered = list(threads.map(apply, copies, pieces))
        with self._marking("communication"):
            return torch.cat(gathered)


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


def replica(network: nn.Module) -> nn.Module:
    """Copy a network so that gradients of the copy's weights add up in the original's."""
    twin = copy.deepcopy(network, {id(parameter): parameter for parameter in network.parameters()})
    for path, parameter in network.named_parameters():
        parent_path, _, name = path.rpartition(".")
        parent = twin.get_submodule(parent_path)
        del parent._parameters[name]
        setattr(parent, name, parameter.clone())
    return twin
