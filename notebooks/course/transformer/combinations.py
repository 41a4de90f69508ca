"""Two at once, on a square of ranks: FSDP2 over tensor parallel, and data parallel over pipelines. Three, on a cube."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course.transformer.base import all_reduce_flat, equal_part, one_by_one, whole
from course.transformer.fsdp import shard
from course.transformer.gpt import GPT
from course.transformer.pipelines import OneFOneB
from course.transformer.tensor_parallel import TensorParallel, cut_blocks, cut_layers
from labkit.steps.counting import local


class FSDP2TensorParallel(TensorParallel):
    """Tensor parallel in pairs of ranks, which are neighbours; what is left, sharded over the pairs."""

    title = "FSDP2 × tensor parallel"
    ranks_per_replica: ClassVar[int] = 2
    """How many ranks have the same samples."""

    @classmethod
    def ranks(cls, world_size: int) -> int:
        """At least 2 × 2."""
        return max(4, world_size - world_size % 2)

    def cut(self, network: GPT) -> nn.Module:
        """Cut the layers within a pair, then shard over the pairs."""
        from torch.distributed.device_mesh import init_device_mesh

        self.pairs = self.worker.world_size // self.ranks_per_replica
        mesh = init_device_mesh(self.worker.device.type, (self.pairs, 2), mesh_dim_names=("dp", "tp"))
        cut_layers(network, mesh["tp"])
        return shard(network, mesh["dp"])

    @property
    def averaged_over(self) -> int:  # type: ignore[override]
        """The pairs."""
        return self.pairs

    def samples(self, batch_size: int) -> Tensor:
        """Return the pair's."""
        return equal_part(batch_size, self.worker.rank // self.ranks_per_replica, self.pairs)


class DataParallelPipeline(OneFOneB):
    """Pipelines of two ranks side by side, each with a part of the batch; equal stages add up their gradients."""

    title = "data parallel × 1F1B"
    ranks_per_replica: ClassVar[int] = 2
    """How many ranks have the same samples."""

    @classmethod
    def ranks(cls, world_size: int) -> int:
        """At least 2 × 2."""
        return max(4, world_size - world_size % 2)

    def cut(self, network: GPT) -> nn.Module:
        """Make the pipelines: ranks 0 and 1, 2 and 3, …"""
        from torch.distributed.device_mesh import init_device_mesh

        self.chains = self.worker.world_size // self.ranks_per_replica
        mesh = init_device_mesh(self.worker.device.type, (self.chains, 2), mesh_dim_names=("dp", "pp"))
        self.same_stage: dist.ProcessGroup = mesh["dp"].get_group()
        return self.make_pipeline(network, self.worker.rank % 2, 2, mesh["pp"].get_group())

    @property
    def averaged_over(self) -> int:  # type: ignore[override]
        """The chains."""
        return self.chains

    def samples(self, batch_size: int) -> Tensor:
        """Return the chain's."""
        return equal_part(batch_size, self.worker.rank // self.ranks_per_replica, self.chains)

    def communicate(self) -> None:
        """Average the gradients of the same stage over the chains."""
        gradients = [local(p.grad) for p in self.model.parameters() if p.grad is not None]
        all_reduce_flat(gradients, self.same_stage)
        for gradient in gradients:
            gradient /= self.chains


class DataPipelineTensorParallel(DataParallelPipeline):
    """Three at once: pipelines of two stages side by side, whose blocks are each cut over two neighbours.

    Ranks 0 and 1 have the first stage of the first pipeline, 2 and 3 the second. What talks most is closest: the pair,
    four times a block. Embedding and head stay whole, so that a stage sends and receives what all others do.
    """

    title = "data parallel × 1F1B × tensor parallel"
    cuts_layers = True
    ranks_per_replica = 4

    def make_optimizer(self, optimizer: Callable[..., torch.optim.Optimizer]) -> torch.optim.Optimizer:
        """Have it step each parameter by itself; see `one_by_one`."""
        return one_by_one(self.model, optimizer)

    @classmethod
    def ranks(cls, world_size: int) -> int:
        """At least 2 × 2 × 2."""
        return max(8, world_size - world_size % 4)

    def cut(self, network: GPT) -> nn.Module:
        """Make the pipelines, then cut the blocks of this rank's stage."""
        from torch.distributed.device_mesh import init_device_mesh

        self.chains = self.worker.world_size // self.ranks_per_replica
        mesh = init_device_mesh(self.worker.device.type, (self.chains, 2, 2), mesh_dim_names=("dp", "pp", "tp"))
        self.same_stage = mesh["dp"].get_group()
        stages = self.make_pipeline(network, self.worker.rank // 2 % 2, 2, mesh["pp"].get_group())
        for stage in stages.children():
            assert isinstance(stage, GPT)
            cut_blocks(stage, mesh["tp"])
        return stages

    def weights(self) -> dict[str, Tensor]:
        """Return the weights of this rank's stage, the pair's parts put together."""
        return {name: whole(tensor) for name, tensor in super().weights().items()}
