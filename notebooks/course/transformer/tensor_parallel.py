"""Tensor parallel: every layer cut over the ranks, attention by heads, embedding and loss by the vocabulary.

Shoeybi et al. 2019 (https://arxiv.org/abs/1909.08053). PyTorch's `parallelize_module` and `loss_parallel`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from course.transformer.base import GPTStrategy, one_by_one
from course.transformer.gpt import GPT


class TensorParallel(GPTStrategy):
    """Each rank has some heads, some hidden units, some of the vocabulary; and the whole batch.

    PyTorch leaves the gradient of the embedding whole on every rank (2.15); the optimizer takes the rank's rows of it.
    """

    title = "tensor parallel"
    cuts_layers = True

    def make_optimizer(self, optimizer: Callable[..., torch.optim.Optimizer]) -> torch.optim.Optimizer:
        """Have it step each parameter by itself; see `one_by_one`."""
        return one_by_one(self.model, optimizer)

    @classmethod
    def ranks(cls, world_size: int) -> int:
        """As many as are asked for."""
        return world_size

    def cut(self, network: GPT) -> nn.Module:
        """Cut the network over all ranks."""
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh(self.worker.device.type, (self.worker.world_size,), mesh_dim_names=("tp",))
        cut_layers(network, mesh)
        return network

    def around(self) -> contextlib.AbstractContextManager[object]:
        """Return `loss_parallel`: the cross-entropy of logits whose vocabulary lies in parts is not gathered."""
        from torch.distributed.tensor.parallel import loss_parallel

        return loss_parallel()


def cut_layers(network: GPT, mesh: Any) -> None:
    """Cut a network over a mesh. Raises ValueError where heads do not divide."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    cut_blocks(network, mesh)
    ends = {
        "embedding": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(network, mesh, ends)


def cut_blocks(network: GPT, mesh: Any) -> None:
    """Cut the blocks of a network, or of a stage, over a mesh. Raises ValueError where heads do not divide."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    check_heads(network, mesh.size())
    for block in network.blocks.values():
        plan = {
            "attention.qkv": ColwiseParallel(),
            "attention.out": RowwiseParallel(),
            "mlp.up": ColwiseParallel(),
            "mlp.down": RowwiseParallel(),
        }
        parallelize_module(block, mesh, plan)


def check_heads(network: GPT, parts: int) -> None:
    """Raise ValueError if attention cannot be cut by heads into so many parts."""
    attention: Any = next(iter(network.blocks.values())).attention
    heads = attention.out.in_features // attention.head_width
    if heads % parts:
        raise ValueError(f"{heads} heads cannot be cut over {parts} ranks; take a multiple of {parts} heads")
