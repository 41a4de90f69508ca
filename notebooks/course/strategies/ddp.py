"""`DistributedDataParallel`: gradients averaged bucket by bucket while the backward pass still computes.

Li et al. 2020 (https://arxiv.org/abs/2006.15704); https://docs.pytorch.org/docs/stable/notes/ddp.html.
"""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from course.strategies.base import DataParallelStrategy


class DDP(DataParallelStrategy):
    """DDP as it comes."""

    title = "DDP"

    def prepare(self, network: nn.Module) -> nn.Module:
        """Wrap the network; all ranks begin with rank 0's weights."""
        self.wrapped = DistributedDataParallel(network)
        return network

    def forward(self, inputs: Tensor) -> Tensor:
        """Call the wrapped network, which prepares the averaging."""
        outputs: Tensor = self.wrapped(inputs)
        return outputs


class DDPAccumulated(DDP):
    """DDP that takes its part in micro-batches and averages once, with the last: `no_sync` around the others."""

    title = "DDP, accumulated"
    MICRO_BATCHES = 4

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Add up the micro-batches' gradients, (rank_batch_size / 4, …) each, then take one step."""
        pieces = self.local_batch(inputs).chunk(self.MICRO_BATCHES), self.local_batch(targets).chunk(self.MICRO_BATCHES)
        self.optimizer.zero_grad()
        total = torch.zeros((), device=inputs.device, dtype=torch.float64)
        for index, (images, labels) in enumerate(zip(*pieces, strict=True)):
            last = index == len(pieces[0]) - 1
            # The forward pass too belongs inside: it is what decides whether gradients will be averaged.
            with contextlib.nullcontext() if last else self.wrapped.no_sync():
                with self.clock("forward"):
                    loss = self.loss(self.forward(images), labels) * len(images) / len(self.local_batch(inputs))
                with self.clock("backward"):
                    loss.backward()
            total += loss.detach()
        with self.clock("optimizer"):
            self.optimizer.step()
        return total


class DDPFp16(DDP):
    """DDP that sends its gradients as 16-bit numbers: half the bytes, and not quite the same step."""

    title = "DDP, fp16 hook"
    exact = False

    def prepare(self, network: nn.Module) -> nn.Module:
        """Wrap the network and have PyTorch's own hook compress its gradients."""
        network = super().prepare(network)
        self.wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
        return network

    def bytes_expected(self, batch_size: int) -> float:
        """As DDP, with two bytes a number."""
        return super().bytes_expected(batch_size) * 2 / self.itemsize
