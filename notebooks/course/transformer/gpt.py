"""A byte-level GPT, from the first byte to the sample that it writes. A plain module: it knows nothing of ranks.

Pre-norm blocks and residuals as in GPT-2 (Radford et al. 2019), rotary positions (Su et al. 2021,
https://arxiv.org/abs/2104.09864), no biases, and a head of its own. Every strategy of this folder trains this one file.
"""

from __future__ import annotations

import math
import pydoc_data.topics
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

from course.transformer.experts import Experts

IGNORED = -100
"""A target that does not count: what follows the end of a sequence that is shorter than the batch is long."""


@dataclass
class Place:
    """Which part of the whole batch a model has before it; all its layers look here."""

    step: int = 0
    samples: Tensor | None = None
    """(rank_batch_size,): numbers of the samples in the whole batch; None: from 0."""
    positions: Tensor | None = None
    """(time,): positions of the bytes in the whole sequence; None: from 0."""
    attended: Tensor | None = None
    """(time,): likewise, in attention; None: the same as `positions`."""


class Dropout(nn.Module):
    """Dropout whose mask depends on the step, the layer and the place in the whole batch, and on nothing else.

    However batch and sequence are cut, and however often it is computed, the same numbers are dropped. That is what
    lets a parallel step with dropout equal one process.
    """

    def __init__(self, share: float, layer: int, place: Place) -> None:
        super().__init__()
        self.share, self.layer, self.place = share, layer, place

    def forward(self, x: Tensor) -> Tensor:
        """Return x, (batch, time, width), with a share of it put to 0 and the rest made larger."""
        if not self.training or self.share == 0:
            return x
        samples, positions = self.place.samples, self.place.positions
        samples = torch.arange(x.shape[0], device=x.device) if samples is None else samples
        positions = torch.arange(x.shape[1], device=x.device) if positions is None else positions
        features = torch.arange(x.shape[2], device=x.device)
        where = (samples[:, None, None] << 40) + (positions[:, None] << 20) + features
        return x * (uniform(where, self.place.step * 1000 + self.layer) >= self.share) / (1 - self.share)


def uniform(numbers: Tensor, seed: int) -> Tensor:
    """Return a random number in [0, 1) for each of some int64 numbers, always the same: splitmix64 (Steele 2014)."""
    x = numbers + (seed + 1) * 0x1E3779B97F4A7C15 % 2**63
    x = (x ^ (x >> 30)) * -0x40A7B892E31B1A47
    x = (x ^ (x >> 27)) * -0x6B2FB644ECCEEE15
    return ((x ^ (x >> 31)) & (2**53 - 1)).double() / 2**53


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return the mean of the values, (batch, heads, time, head width), that each query may see: its own and earlier."""
    return scaled_dot_product_attention(q, k, v, is_causal=True)


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Turn pairs of features of x, (batch, heads, time, head width), by angles that grow with the position."""
    half = x.shape[-1] // 2
    speeds = 10_000 ** -(torch.arange(half, device=x.device, dtype=torch.float64) / half)
    angles = positions[:, None] * speeds  # (time, half)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class Attention(nn.Module):
    """Causal attention. Queries, keys and values of a head stand together in `qkv`, so that it can be cut by heads."""

    def __init__(self, width: int, heads: int, place: Place) -> None:
        super().__init__()
        self.head_width, self.place = width // heads, place
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.attend: Callable[[Tensor, Tensor, Tensor], Tensor] = causal_attention
        """Of queries, keys and values, (batch, heads, time, head width) each."""

    def forward(self, x: Tensor) -> Tensor:
        """Return what every position, (batch, time, width), gathers from itself and those before it."""
        batch, time, _ = x.shape
        qkv = self.qkv(x).view(batch, time, -1, 3, self.head_width)  # as many heads as there are here
        q, k, v = qkv.transpose(1, 2).unbind(3)
        positions = self.place.positions if self.place.attended is None else self.place.attended
        positions = torch.arange(time, device=x.device) if positions is None else positions
        found = self.attend(rotate(q, positions), rotate(k, positions), v)
        outputs: Tensor = self.out(found.transpose(1, 2).reshape(batch, time, -1))
        return outputs


class MLP(nn.Module):
    """Each position by itself: four times as wide, and back."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return (batch, time, width)."""
        outputs: Tensor = self.down(gelu(self.up(x)))
        return outputs


class Block(nn.Module):
    """Attention, then the MLP; each adds to what it was given."""

    def __init__(self, width: int, heads: int, dropout: float, number: int, place: Place, experts: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, place)
        self.mlp = Experts(width, experts) if experts else MLP(width)
        self.dropout1 = Dropout(dropout, 2 * number + 1, place)
        self.dropout2 = Dropout(dropout, 2 * number + 2, place)

    def forward(self, x: Tensor) -> Tensor:
        """Return (batch, time, width)."""
        x = x + self.dropout1(self.attention(self.norm1(x)))
        outputs: Tensor = x + self.dropout2(self.mlp(self.norm2(x)))
        return outputs


class GPT(nn.Module):
    """Bytes, (batch, time), to logits of the byte that follows each, (batch, time, vocabulary).

    Args:
        depth: number of blocks.
        width: features of a position; a multiple of `heads`.
        heads: of attention, each of an even width.
        dropout: share of features dropped after the embedding, after attention and after the MLP; see `Dropout`.
        experts: with more than 0, each block has a mixture of so many experts in the place of the MLP.
        vocabulary: how many different tokens there are; bytes have 256.
    """

    def __init__(
        self,
        depth: int = 4,
        width: int = 64,
        heads: int = 4,
        dropout: float = 0.0,
        experts: int = 0,
        vocabulary: int = 256,
    ) -> None:
        super().__init__()
        if width % (2 * heads):
            raise ValueError(f"width ({width}) must be a multiple of 2 × heads ({heads}): rotary positions turn pairs")
        self.place = Place()
        # Parts are None, and blocks fewer, in a stage of a pipeline: `stage` below.
        self.embedding: nn.Embedding | None = nn.Embedding(vocabulary, width)
        self.dropout = Dropout(dropout, 0, self.place)
        self.blocks = nn.ModuleDict(
            {str(i): Block(width, heads, dropout, i, self.place, experts) for i in range(depth)}
        )
        self.norm: nn.LayerNorm | None = nn.LayerNorm(width)
        self.head: nn.Linear | None = nn.Linear(width, vocabulary, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:  # what adds to the residual begins smaller, as in GPT-2
                deep = name.endswith(("out.weight", "down.weight", "down"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * depth) if deep else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits; in a stage that is not the last, features, (batch, time, width)."""
        x = tokens if self.embedding is None else self.dropout(self.embedding(tokens))
        for block in self.blocks.values():
            x = block(x)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


def stage(model: GPT, index: int, stages: int) -> GPT:
    """Leave of a model one of `stages` consecutive parts; every part keeps its name. Raises ValueError for too many."""
    names = list(model.blocks)
    if len(names) < stages:
        raise ValueError(f"{len(names)} blocks cannot be cut into {stages} stages; make the model deeper")
    begin, end = (round(edge * len(names) / stages) for edge in (index, index + 1))
    for name in names[:begin] + names[end:]:
        del model.blocks[name]
    if index > 0:
        model.embedding = None
    if index < stages - 1:
        model.norm = model.head = None
    return model


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean over the targets that count, shape (): of (batch, time, vocabulary) and (batch, time)."""
    total = cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
    return total / (targets != IGNORED).sum().clamp(min=1)


def text(dataset: str = "help", data_root: str | None = None) -> bytes:
    """Return a file of text from data_root, if it is there; else the 600 KB of English of Python's own `help()`."""
    path = Path(data_root or ".") / dataset
    if path.is_file():
        return path.read_bytes()
    return "\n".join(pydoc_data.topics.topics.values()).encode()


def batches(
    text: bytes, batch_size: int, time: int, seed: int = 0, ragged: bool = False, device: str | torch.device = "cpu"
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield bytes and those that follow them, (batch_size, time) each, drawn from a text, for ever.

    With `ragged`, sequences end somewhere between a quarter and the whole of `time`: what follows is 0, and its
    targets are `IGNORED`.
    """
    all_bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(all_bytes) - time, (batch_size,), generator=generator)
        windows = all_bytes[starts[:, None] + torch.arange(time + 1)]
        inputs, targets = windows[:, :-1].clone(), windows[:, 1:].clone()
        if ragged:
            lengths = torch.randint(max(1, time // 4), time + 1, (batch_size, 1), generator=generator)
            beyond = torch.arange(time) >= lengths
            inputs[beyond], targets[beyond] = 0, IGNORED
        yield inputs.to(device), targets.to(device)


@torch.no_grad()
def write(model: nn.Module, prompt: str, length: int, time: int, temperature: float = 0.7, seed: int = 0) -> str:
    """Return the prompt and `length` bytes that the model writes after it, sampled one by one from its predictions.

    It sees `time` bytes at most, as in training. Near temperature 0 it takes the likeliest; at 1 its own distribution.
    """
    generator = torch.Generator().manual_seed(seed)
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    tokens = list(prompt.encode())
    for _ in range(length):
        logits = model(torch.tensor([tokens[-time:]], device=device))[0, -1].float().cpu()
        probabilities = (logits / temperature).softmax(-1)
        tokens.append(int(torch.multinomial(probabilities, 1, generator=generator)))
    model.train(was_training)
    return bytes(tokens).decode(errors="replace")


def words_share(written: str, text: bytes) -> float:
    """Return the share of words, of three letters or more, in what was written that the text has, too."""
    words = re.findall(r"[A-Za-z]{3,}", written)
    known = set(re.findall(r"[A-Za-z]{3,}", text.decode()))
    return sum(word in known for word in words) / max(1, len(words))
