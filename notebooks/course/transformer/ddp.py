"""DDP: the whole GPT on every rank, gradients averaged while the backward pass still computes."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from course.transformer.base import DataParallelGPT
from course.transformer.gpt import GPT


class DDP(DataParallelGPT):
    """PyTorch's DDP, as it comes."""

    title = "DDP"

    def cut(self, network: GPT) -> nn.Module:
        """Wrap the network."""
        self.wrapped = DistributedDataParallel(network)
        return network

    def forward(self, inputs: Tensor) -> Tensor:
        """Call the wrapped network, which prepares the averaging."""
        outputs: Tensor = self.wrapped(inputs)
        return outputs
