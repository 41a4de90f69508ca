"""FSDP2: a part of every parameter on each rank, gathered block by block when it is needed (Zhao et al. 2023)."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn

from course.strategies.sharding import reduce_scatters
from course.transformer.base import DataParallelGPT, ring
from course.transformer.gpt import GPT
from labkit.profiling import size_bytes

LESSON = "21"


class FSDP2(DataParallelGPT):
    """PyTorch's `fully_shard` of every block and of the whole; after its forward a block forgets what it gathered."""

    title = "FSDP2"
    reshard: ClassVar[bool] = True
    """Whether gathered parameters are dropped after the forward pass, and gathered once more for the backward pass."""

    def cut(self, network: GPT) -> nn.Module:
        """Shard over all ranks."""
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh(self.worker.device.type, (self.worker.world_size,), mesh_dim_names=("dp",))
        self.whole_bytes = size_bytes(network.parameters())
        shard(network, mesh, self.reshard)
        return network

    def bytes_expected(self, batch_size: int) -> float:
        """Return one all-gather before forward, one before backward where it was forgotten, and one reduce-scatter."""
        gathers = 2 if self.reshard else 1
        return ring(self.worker.world_size) * (gathers + reduce_scatters()) * self.whole_bytes


class FSDP2Kept(FSDP2):
    """`reshard_after_forward=False`: what was gathered stays until the backward pass. ZeRO-2, by its other name."""

    title = "FSDP2, kept after forward"
    reshard = False


def shard(network: GPT, mesh: Any, reshard: bool = True) -> None:
    """Apply `fully_shard` to every block, then to the whole."""
    from torch.distributed.fsdp import fully_shard

    for block in network.blocks.values():
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(network, mesh=mesh, reshard_after_forward=reshard)
