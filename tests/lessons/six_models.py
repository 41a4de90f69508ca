"""Six models that are in no lesson, as somebody might bring them; each with a batch and a loss."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import cross_entropy

CLASSES, WORDS, LENGTH = 5, 61, 12


class ResidualBlock(nn.Module):
    def __init__(self, channels, norm):
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        self.norm1, self.norm2 = norm(channels), norm(channels)

    def forward(self, x):
        return (x + self.norm2(self.second(self.norm1(self.first(x)).relu()))).relu()


def groups(channels):
    return nn.GroupNorm(4, channels)


class ResidualCNN(nn.Module):
    """A chain of residual blocks; `forward` calls one after the other."""

    def __init__(self, channels=16, depth=3, norm=groups):
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.blocks = nn.Sequential(*(ResidualBlock(channels, norm) for _ in range(depth)))
        self.pool, self.flatten, self.head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES)

    def forward(self, x):
        return self.head(self.flatten(self.pool(self.blocks(self.stem(x)))))


class Embed(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width), nn.Parameter(torch.randn(LENGTH, width))

    def forward(self, tokens):
        return self.words(tokens) + self.places


class Transformer(nn.Module):
    """Blocks in a `ModuleList`, made of PyTorch's own layer."""

    def __init__(self, width=32, depth=3):
        super().__init__()
        self.embed = Embed(width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True) for _ in range(depth)
        )
        self.head = nn.Linear(width, WORDS)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class MixerBlock(nn.Module):
    def __init__(self, places, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.over_places = nn.Sequential(nn.Linear(places, 2 * places), nn.GELU(), nn.Linear(2 * places, places))
        self.over_width = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        x = x + self.over_places(self.norm1(x).mT).mT
        return x + self.over_width(self.norm2(x))


class Mixer(nn.Module):
    """An MLP-Mixer, whose `forward` takes a mean between two layers."""

    def __init__(self, width=24, depth=3):
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, stride=4)
        self.blocks = nn.ModuleList(MixerBlock(16, width) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, x):
        x = self.patches(x).flatten(2).mT
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


class Recommender(nn.Module):
    """Tables, and a network over what is looked up in them."""

    def __init__(self, width=8, rows=2000):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(3))
        self.over = nn.Sequential(nn.Linear(3 * width, 32), nn.ReLU(), nn.Linear(32, CLASSES))

    def forward(self, ids):
        looked_up = [table(column) for table, column in zip(self.tables, ids.unbind(1), strict=True)]
        return self.over(torch.cat(looked_up, 1))


class TiedLM(nn.Module):
    """A language model whose head has the embedding's weights."""

    def __init__(self, width=32, depth=2):
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True) for _ in range(depth)
        )
        self.head = nn.Linear(width, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class UNet(nn.Module):
    """Two levels down, two up, and what was there on the way down beside it."""

    def __init__(self, channels=8):
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(3, channels, 3, padding=1), nn.Conv2d(channels, 2 * channels, 3, padding=1)
        self.middle = nn.Conv2d(2 * channels, 2 * channels, 3, padding=1)
        self.up = nn.ConvTranspose2d(2 * channels, channels, 2, stride=2)
        self.last = nn.Conv2d(2 * channels, CLASSES, 3, padding=1)
        self.pool = nn.MaxPool2d(2)

    def forward(self, x):
        one = self.down1(x).relu()
        two = self.middle(self.down2(self.pool(one)).relu()).relu()
        return self.last(torch.cat([one, self.up(two)], 1))


def images(samples):
    return torch.randn(samples, 3, 16, 16), torch.randint(CLASSES, (samples,))


def tokens(samples):
    return torch.randint(WORDS, (samples, LENGTH)), torch.randint(WORDS, (samples, LENGTH))


def ids(samples):
    return torch.randint(2000, (samples, 3)), torch.randint(CLASSES, (samples,))


def maps(samples):
    return torch.randn(samples, 3, 16, 16), torch.randint(CLASSES, (samples, 16, 16))


SIX = {
    "residual CNN": (ResidualCNN, images),
    "transformer": (Transformer, tokens),
    "MLP-Mixer": (Mixer, images),
    "recommender": (Recommender, ids),
    "tied language model": (TiedLM, tokens),
    "U-Net": (UNet, maps),
}


def loss(outputs, targets):
    if targets.dim() == 2:  # classes come last
        return cross_entropy(outputs.flatten(0, 1), targets.flatten())
    return cross_entropy(outputs, targets)
