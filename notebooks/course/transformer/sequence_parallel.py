"""Sequence parallel: tensor parallel that cuts what lies between the cut layers, too, along the sequence.

Korthikanti et al. 2022 (https://arxiv.org/abs/2205.05198). PyTorch's `SequenceParallel` for the norms.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from course.transformer.base import equal_part
from course.transformer.gpt import GPT
from course.transformer.tensor_parallel import TensorParallel, check_heads


class SequenceParallel(TensorParallel):
    """Each all-reduce taken apart: a reduce-scatter behind a cut layer, an all-gather before the next.

    In between (norm, dropout, residual) each rank has its part of every sequence, and keeps only the activations of it.
    """

    title = "sequence parallel"

    def cut(self, network: GPT) -> nn.Module:
        """Cut layers by heads and units, and what lies between them along the sequence."""
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh(self.worker.device.type, (self.worker.world_size,), mesh_dim_names=("tp",))
        cut_layers_and_sequence(network, mesh)
        return network

    def set_place(self, inputs: Tensor) -> None:
        """Attention sees the whole sequence; dropout, a part of it."""
        super().set_place(inputs)
        time = inputs.shape[1]
        self.place.attended = torch.arange(time, device=inputs.device)
        mine = equal_part(time, self.worker.rank, self.worker.world_size)
        self.place.positions = mine.to(inputs.device)


def cut_layers_and_sequence(network: GPT, mesh: Any) -> None:
    """Cut a network over a mesh, the sequence included. Raises ValueError where heads do not divide."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        parallelize_module,
    )
    from torch.distributed.tensor.parallel import SequenceParallel as Along

    check_heads(network, mesh.size())
    gather: Any = {"input_layouts": Shard(1), "desired_input_layouts": Replicate()}
    for block in network.blocks.values():
        plan: dict[str, Any] = {
            "norm1": Along(),
            "attention": PrepareModuleInput(**gather, use_local_output=True),
            "attention.qkv": ColwiseParallel(),
            "attention.out": RowwiseParallel(output_layouts=Shard(1)),
            "norm2": Along(),
            "mlp.up": ColwiseParallel(input_layouts=Shard(1)),
            "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(block, mesh, plan)
    ends = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": Along(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(network, mesh, ends)
