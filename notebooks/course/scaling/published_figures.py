"""Figures that others have published, and what is predicted for them. Nothing here was fitted to any.

Memory of parameters, gradients and optimizer by `predict_memory`; activations of Megatron's layer by counting one,
since it is not our GPT's: it has biases and dropout inside attention, keeps the attention scores, and
masks of one byte.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

from course.scaling.counting import KeepInput, fake, kept
from course.scaling.memory_model import predict_memory
from course.transformer import GPT


class Point(NamedTuple):
    """A published figure and its prediction, in bytes, or in numbers where it says parameters."""

    what: str
    published: float
    predicted: float
    source: str

    @property
    def error(self) -> float:
        """How far off the prediction is, as a part of what was published."""
        return self.predicted / self.published - 1


BROWN = "Brown et al. 2020, table 2.1 (https://arxiv.org/abs/2005.14165)"
SMITH = "Smith et al. 2022 (https://arxiv.org/abs/2201.11990)"
RAJBHANDARI = "Rajbhandari et al. 2020, figure 1 (https://arxiv.org/abs/1910.02054)"
KORTHIKANTI = "Korthikanti et al. 2022, table 2 (https://arxiv.org/abs/2205.05198)"

MODELS = {
    # blocks, width, heads, vocabulary; parameters as published
    "GPT-3 2.7B": (32, 2560, 32, 50257, 2.7e9, BROWN),
    "GPT-3 6.7B": (32, 4096, 32, 50257, 6.7e9, BROWN),
    "GPT-3 175B": (96, 12288, 96, 50257, 175e9, BROWN),
    "MT-NLG 530B": (105, 20480, 128, 50257, 530e9, SMITH),
}

ZERO = {"DDP": 120e9, "ZeRO-1": 31.4e9, "FSDP2, kept after forward": 16.6e9, "FSDP2": 1.9e9}
"""Of 7.5 billion parameters on 64 ranks, Adam in mixed precision: bytes of model states on each."""


def gpt(depth: int, width: int, heads: int, vocabulary: int) -> GPT:
    """Return a GPT of this size that has no memory."""
    with torch.device("meta"):
        return GPT(depth, width, heads, vocabulary=vocabulary)


def published() -> list[Point]:
    """Return all points. Takes a second or two."""
    return [*_sizes(), *_zero(), *_megatron()]


def _sizes() -> list[Point]:
    """Parameters of models that share the weights of embedding and head, which our GPT does not: they are taken off."""
    points = []
    for name, (depth, width, heads, vocabulary, parameters, source) in MODELS.items():
        held = predict_memory(gpt(depth, width, heads, vocabulary), "one process", 1, 1, 8, "float32")[0].parameters / 4
        points.append(Point(f"parameters of {name}", parameters, held - vocabulary * width, source))
    return points


def _zero() -> list[Point]:
    """Model states by ZeRO's stages. The figure says how many parameters, not in which blocks: 37 are one way."""
    model = gpt(37, 4096, 32, 6225)
    points = []
    for strategy, size in ZERO.items():
        held = predict_memory(model, strategy, 64, 64, 8, "bf16")[0]
        total = held.parameters + held.gradients + held.optimizer_state
        if "kept" in strategy:  # stage 2 has parameters whole; here they are gathered
            total += held.communication - held.parameters
        points.append(Point(f"model states of 7.5B on 64 ranks, {strategy}", size, total, RAJBHANDARI))
    return points


def _megatron() -> list[Point]:
    """Activations of one layer for one sequence of 2 048, bytes, by the formulas of the paper's table."""
    points = []
    for name, (width, heads) in {"GPT-3 175B": (12288, 96), "MT-NLG 530B": (20480, 128)}.items():
        sbh, scores = 2048 * width, 5 * heads * 2048 / width
        rows: dict[str, tuple[float, dict[str, Any]]] = {
            "one rank": (34 + scores, {}),
            "tensor parallel 8": (10 + 24 / 8 + scores / 8, {"parts": 8}),
            "tensor and sequence parallel 8": ((34 + scores) / 8, {"parts": 8, "sequence": True}),
            "the same, scores recomputed": (34 / 8, {"parts": 8, "sequence": True, "selective": True}),
            "recomputed": (2, {"full": True}),
        }
        for title, (factor, options) in rows.items():
            found = megatron_layer_bytes(2048, width, heads, **options)
            points.append(Point(f"activations of a layer of {name}, {title}", sbh * factor, found, KORTHIKANTI))
    return points


def megatron_layer_bytes(
    time: int,
    width: int,
    heads: int,
    parts: int = 1,
    sequence: bool = False,
    selective: bool = False,
    full: bool = False,
) -> int:
    """Return the bytes that one of Megatron's layers keeps for one sequence, in numbers of 16 bits.

    Args:
        time: positions of the sequence.
        width: features of a position.
        heads: of attention.
        parts: ranks of tensor parallel.
        sequence: whether norms and dropouts are cut along the sequence too, which Megatron gathers again backward.
        selective: whether attention's scores are recomputed.
        full: whether the layer is.
    """
    with fake(torch.bfloat16):
        layer = MegatronLayer(time, width, heads, parts, sequence, selective)
        x = torch.zeros(time // (parts if sequence else 1), 1, width, requires_grad=True)
        return kept(layer, lambda: KeepInput.apply(x) if full else layer(x))


class MegatronLayer(nn.Module):
    """A rank's part of a layer as Korthikanti et al. draw it: (time, batch, width) to the same."""

    def __init__(self, time: int, width: int, heads: int, parts: int, sequence: bool, selective: bool) -> None:
        super().__init__()
        self.time, self.heads, self.sequence, self.selective = time, heads // parts, sequence, selective
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Parameter(torch.empty(width // parts, width)) for _ in range(3))
        self.out = nn.Linear(width // parts, width, bias=False)
        self.up = nn.Parameter(torch.empty(4 * width // parts, width))
        self.down = nn.Linear(4 * width // parts, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return what the next layer gets."""
        cut = slice(len(x))
        found = self.attend(self.norm1(x))
        x = x + torch.native_dropout(self.out(found)[cut], 0.1, True)[0]
        (hidden,) = Gathered.apply(self.norm2(x), self.time, self.up)
        return x + torch.native_dropout(self.down(gelu(hidden))[cut], 0.1, True)[0]

    def attend(self, x: Tensor) -> Tensor:
        """Return what every position gathers from the others, of this rank's heads."""
        parts = Gathered.apply(x, self.time, self.q, self.k, self.v)
        if self.selective:
            return Recomputed.apply(*parts)
        q, k, v = (part.view(self.time, self.heads, -1).transpose(0, 1) for part in parts)
        odds = (q @ k.mT).softmax(-1)
        found = torch.native_dropout(odds, 0.1, True)[0] @ v
        return found.transpose(0, 1).reshape(self.time, 1, -1)


class Gathered(torch.autograd.Function):
    """Linear layers of one input, gathered along the sequence for them; what is kept is the rank's part of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, time: int, *weights: Tensor) -> tuple[Tensor, ...]:
        """Return an output for each weight."""
        ctx.save_for_backward(x, *weights)
        return tuple(x.new_empty(time, x.shape[1], len(weight)) for weight in weights)


class Recomputed(torch.autograd.Function):
    """Attention of which queries, keys and values are all that is kept."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return something of the shape of its output."""
        ctx.save_for_backward(q, k, v)
        return torch.empty_like(v)
