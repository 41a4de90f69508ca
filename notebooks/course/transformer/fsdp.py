"""FSDP2: a part of every parameter on each rank, gathered block by block when it is needed (Zhao et al. 2023)."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn

from course.transformer.base import DataParallelGPT
from course.transformer.gpt import GPT


class FSDP2(DataParallelGPT):
    """PyTorch's `fully_shard` of every block and of the whole; after its forward pass a block is resharded."""

    title = "FSDP2"
    reshard: ClassVar[bool] = True
    """Whether gathered parameters are dropped after the forward pass, and gathered once more for the backward pass."""

    def cut(self, network: GPT) -> nn.Module:
        """Shard over all ranks."""
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh(self.worker.device.type, (self.worker.world_size,), mesh_dim_names=("dp",))
        return shard(network, mesh, self.reshard)


class FSDP2Kept(FSDP2):
    """`reshard_after_forward=False`: what was gathered stays until the backward pass.

    It sends what ZeRO-2 does. But ZeRO-2 keeps whole parameters between the steps, too, and this does not.
    """

    title = "FSDP2, kept after forward"
    reshard = False


def shard(network: GPT, mesh: Any, reshard: bool = True) -> GPT:
    """Shard a GPT over a mesh of one dimension, in place: each block is a unit, and what is left of the whole.

    The whole is not told `reshard`: its own parameters are the last in the forward pass and the first in the backward
    pass, so PyTorch's default keeps them, and does not gather them twice in a row.
    """
    from torch.distributed.fsdp import fully_shard

    for block in network.blocks.values():
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(network, mesh=mesh)
    return network
