"""What of a GPT each rank has, by strategy: a smaller network of the same kind, whose forward pass can be counted.

No rank is there and nothing is sent: where a collective would be, stands something that gives the same shape. So a rank
of tensor parallel is a GPT with fewer heads and hidden units; one of sequence parallel cuts and gathers besides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from course.scaling.counting import KeepInput
from course.transformer.experts import Experts
from course.transformer.gpt import GPT, Attention


class Shape(NamedTuple):
    """All of a `GPT` of `course.transformer` that memory depends on."""

    depth: int
    width: int
    heads: int
    vocabulary: int
    experts: int
    dropout: float

    @classmethod
    def of(cls, model: Any) -> Shape:
        """Return a model's. Raises ValueError for what is not a whole `GPT` of `course.transformer`."""
        if not isinstance(model, GPT) or model.embedding is None or model.head is None or not len(model.blocks):
            raise ValueError(
                f"known is the memory of a whole course.transformer.GPT, got a {type(model).__name__}; make a GPT of "
                "the same size, under `with torch.device('meta')` if it is large"
            )
        block: Any = next(iter(model.blocks.values()))
        attention, mlp = block.attention, block.mlp
        return cls(
            len(model.blocks),
            model.embedding.embedding_dim,
            attention.out.in_features // attention.head_width,
            model.embedding.num_embeddings,
            mlp.router.out_features if isinstance(mlp, Experts) else 0,
            model.dropout.share,
        )

    def model(self, depth: int) -> GPT:
        """Return a GPT of this shape, but for its depth."""
        return GPT(depth, self.width, self.heads, self.dropout, self.experts, self.vocabulary)


def narrow(model: GPT, parts: int, ends: bool = True) -> GPT:
    """Leave the first of `parts` parts of heads, hidden units and, at the ends, vocabulary: tensor parallel."""
    assert model.embedding is not None
    assert model.head is not None
    vocabulary, width = model.embedding.num_embeddings, model.embedding.embedding_dim
    some = -(-vocabulary // parts)  # as DTensor cuts: the first ranks have most
    for block in model.blocks.values():
        attention: Any = block.attention
        attention.qkv = nn.Linear(width, 3 * width // parts, bias=False)
        attention.out = nn.Linear(width // parts, width, bias=False)
        mlp: Any = block.mlp
        mlp.up = nn.Linear(width, 4 * width // parts, bias=False)
        mlp.down = nn.Linear(4 * width // parts, width, bias=False)
    if not ends:
        return model
    model.embedding = nn.Embedding(some, width)
    model.head = nn.Linear(width, some, bias=False)
    return model


def cut_between(model: GPT, parts: int, time: int) -> GPT:
    """Have what lies between the cut layers see one of `parts` parts of the sequence: sequence parallel."""

    def gather(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (inputs[0].repeat(1, parts, 1),)

    def scatter(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return output[:, : time // parts].clone()

    assert model.embedding is not None
    assert model.head is not None
    model.embedding.register_forward_hook(scatter)
    model.head.register_forward_pre_hook(gather)
    blocks: Any = model.blocks.values()
    for block in blocks:
        attention, mlp = block.attention, block.mlp
        attention.register_forward_pre_hook(gather)
        attention.out.register_forward_hook(scatter)
        mlp.up.register_forward_pre_hook(gather)
        mlp.down.register_forward_hook(scatter)
    model.place.positions, model.place.attended = torch.arange(time // parts), torch.arange(time)
    return model


def attend_in_ring(model: GPT) -> GPT:
    """Have attention keep what a ring's does: context parallel, where a rank has a part of the sequence."""
    for module in model.modules():
        if isinstance(module, Attention):
            module.attend = _KeptByRing.apply
    return model


class _KeptByRing(torch.autograd.Function):
    """What `course.transformer.ring_attention` saves: queries, keys, values, their mean, a number for each query."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mean, total = torch.zeros_like(q), torch.zeros_like(q[..., :1])
        ctx.save_for_backward(q, k, v, mean, total)
        return mean


def share_experts(model: GPT, parts: int) -> GPT:
    """Leave one of `parts` parts of the experts, who get slots from all ranks: expert parallel."""

    def exchange(slots: Tensor, apply: Callable[[Tensor], Tensor]) -> Tensor:
        batch, experts, capacity, width = slots.shape
        by_rank = slots.view(batch, parts, experts // parts, capacity, width).transpose(0, 1)
        arrived = by_rank.contiguous().clone()
        done = apply(arrived.flatten(0, 1)).view_as(arrived)
        return done.clone().transpose(0, 1).reshape(batch, experts, capacity, width)

    for block in model.blocks.values():
        layer: Any = block.mlp
        layer.exchange = exchange
        layer.up, layer.down = (nn.Parameter(w.detach().chunk(parts)[0].clone()) for w in (layer.up, layer.down))
    return model


def recomputed(model: GPT) -> GPT:
    """Have every block keep its input only."""
    for block in model.blocks.values():
        block.forward = KeepInput.apply
    return model


def part_of_pipeline(model: GPT, is_first: bool, is_last: bool) -> GPT:
    """Leave what a stage of a pipeline has besides its blocks."""
    if not is_first:
        model.embedding = None
    if not is_last:
        model.norm = model.head = None
    return model


def stage_depths(depth: int, stages: int) -> list[int]:
    """Return how many blocks each stage has. Raises ValueError for too many, as `course.transformer.gpt.stage`."""
    if depth < stages:
        raise ValueError(f"{depth} blocks cannot be cut into {stages} stages; make the model deeper")
    edges = [round(edge * depth / stages) for edge in range(stages + 1)]
    return [b - a for a, b in zip(edges, edges[1:], strict=False)]
