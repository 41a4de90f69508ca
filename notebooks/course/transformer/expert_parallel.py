"""Expert parallel: some experts on each rank; an all-to-all brings every token to its expert, another one back.

GShard: Lepikhin et al. 2020 (https://arxiv.org/abs/2006.16668). By hand: PyTorch has the all-to-all, not the layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course.transformer.base import DataParallelGPT, all_reduce_flat
from course.transformer.experts import Experts
from course.transformer.gpt import GPT


class AllToAll(torch.autograd.Function):
    """`all_to_all_single` of equal parts: rank i's part j becomes rank j's part i. So does its gradient."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor) -> Tensor:
        """Exchange the parts, which lie along the first dimension."""
        parts = parts.contiguous()  # and so `arrived` is: `empty_like` would take over the gaps
        arrived = torch.empty_like(parts)
        dist.all_to_all_single(arrived, parts)
        return arrived

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Exchange the gradients."""
        return AllToAll.apply(gradients[0])


def exchange(slots: Tensor, apply_experts: Callable[[Tensor], Tensor]) -> Tensor:
    """Return (batch, experts, capacity, width), worked on by experts that lie on the ranks, a row of them each."""
    n = dist.get_world_size()
    batch, experts, capacity, width = slots.shape
    by_rank = slots.view(batch, n, experts // n, capacity, width).transpose(0, 1)
    arrived = AllToAll.apply(by_rank.contiguous())  # (n, batch, experts / n, capacity, width), of rank 0, 1, …
    done = apply_experts(arrived.flatten(0, 1)).view_as(arrived)
    back = AllToAll.apply(done)
    return back.transpose(0, 1).reshape(batch, experts, capacity, width)


class ExpertParallel(DataParallelGPT):
    """Samples and experts shared out; attention, router and norms on every rank, averaged as in data parallel."""

    title = "expert parallel"

    def cut(self, network: GPT) -> nn.Module:
        """Keep this rank's experts. Raises ValueError if the network has none, or not a multiple of the ranks."""
        rank, n = self.worker.rank, self.worker.world_size
        self.experts = [block.mlp for block in network.blocks.values() if isinstance(block.mlp, Experts)]
        for layer in self.experts:
            if len(layer.up) % n:
                raise ValueError(f"{len(layer.up)} experts cannot be shared by {n} ranks; take a multiple of {n}")
            layer.exchange = exchange
            layer.up = nn.Parameter(layer.up.detach().chunk(n)[rank].clone())
            layer.down = nn.Parameter(layer.down.detach().chunk(n)[rank].clone())
        if not self.experts:
            raise ValueError("this network has no experts; make it with course.transformer.GPT(experts=4)")
        own = {id(p) for layer in self.experts for p in (layer.up, layer.down)}
        self.shared = [p for p in network.parameters() if id(p) not in own]
        return network

    def communicate(self) -> None:
        """Average the gradients of what every rank has. An expert's are whole: all that was for it has come to it."""
        n = self.worker.world_size
        all_reduce_flat([p.grad for p in self.shared if p.grad is not None])
        for parameter in self.network.parameters():
            if parameter.grad is not None:
                parameter.grad /= n

    def weights(self) -> dict[str, Tensor]:
        """Return the whole weights, the experts of all ranks among them."""
        found = self.network.state_dict()
        for name, tensor in found.items():
            if name.endswith(("mlp.up", "mlp.down")):
                parts = [torch.empty_like(tensor) for _ in range(self.worker.world_size)]
                dist.all_gather(parts, tensor.contiguous())
                found[name] = torch.cat(parts)
        return found
