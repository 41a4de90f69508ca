"""FSDP2: a part of every parameter on each rank, gathered block by block when it is needed (Zhao et al. 2023)."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from course.strategies.sharding import fsdp_bytes, shard
from course.transformer.base import DataParallelGPT
from course.transformer.gpt import GPT


class FSDP2(DataParallelGPT):
    """PyTorch's `fully_shard` of every block and of the whole; after its forward a block forgets what it gathered."""

    title = "FSDP2"
    reshard: ClassVar[bool] = True
    """Whether gathered parameters are dropped after the forward pass, and gathered once more for the backward pass."""

    def cut(self, network: GPT) -> nn.Module:
        """Shard over all ranks."""
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh(self.worker.device.type, (self.worker.world_size,), mesh_dim_names=("dp",))
        self.units = shard(network, mesh, network.blocks.values(), self.reshard)
        return network

    def bytes_expected(self, batch_size: int) -> float:
        """Return one all-gather before forward, one before backward where it was forgotten, and one reduce-scatter."""
        return fsdp_bytes(self.units, self.worker.world_size)


class FSDP2Kept(FSDP2):
    """`reshard_after_forward=False`: what was gathered stays until the backward pass.

    It sends what ZeRO-2 does. But ZeRO-2 keeps whole parameters between the steps, too, and this does not.
    """

    title = "FSDP2, kept after forward"
    reshard = False
