"""Hogwild: ranks change the same weights in shared memory without waiting for each other (Niu et al. 2011)."""

from __future__ import annotations

import os
import tempfile

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course.strategies.base import DataParallelStrategy


class Hogwild(DataParallelStrategy):
    """One set of weights for all ranks of this machine; each takes its own steps on it.

    Not the step of one process, nor twice the same: the result depends on who comes first
    (https://arxiv.org/abs/1106.5730). Weights live on the CPU.
    """

    title = "Hogwild"
    exact = False

    def prepare(self, network: nn.Module) -> nn.Module:
        """Move the weights into memory that all ranks share."""
        network = network.cpu()
        with torch.no_grad():
            for parameter in network.parameters():
                shared = shared_tensor(parameter.numel(), parameter.dtype).view_as(parameter)
                if self.worker.rank == 0:
                    shared.copy_(parameter)
                parameter.data = shared
        dist.barrier()  # until rank 0 has written the beginning
        return network

    def local_batch(self, batch: Tensor) -> Tensor:
        """Return the rank's part, (batch_size / world_size, …), on the CPU."""
        return super().local_batch(batch).cpu()

    def communicate(self) -> None:
        """Divide by the number of ranks: all of them will add their step to the weights."""
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad /= self.worker.world_size

    def weights(self) -> dict[str, Tensor]:
        """Return the weights once every rank has come here. Called on all ranks at once."""
        dist.barrier()
        weights = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        dist.barrier()  # before any rank changes them again
        return weights

    def bytes_expected(self, batch_size: int) -> float:
        """Nothing travels."""
        return 0.0


def shared_tensor(numel: int, dtype: torch.dtype) -> Tensor:
    """Return zeros, (numel,), in memory that all ranks of this machine share. Called on all ranks at once."""
    box: list[str | None] = [None]
    if dist.get_rank() == 0:
        descriptor, path = tempfile.mkstemp(prefix="labkit-")
        os.close(descriptor)
        box = [path]
    dist.broadcast_object_list(box)
    path = str(box[0])
    if dist.get_rank() == 0:
        torch.from_file(path, shared=True, size=numel, dtype=dtype).zero_()  # makes the file as long as it must be
    dist.barrier()
    tensor = torch.from_file(path, shared=True, size=numel, dtype=dtype)
    dist.barrier()
    if dist.get_rank() == 0:
        os.unlink(path)  # the memory lives as long as a rank uses it
    return tensor
