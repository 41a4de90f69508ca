"""The networks that the lessons train. Plain modules: they know nothing of ranks."""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn


def linear(inputs: int = 28 * 28, classes: int = 10) -> nn.Sequential:
    """Softmax regression: images of `inputs` values in all → `classes` logits."""
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, classes))


class ConvNet(nn.Module):
    """Two convolutions and two linear layers: (batch, 1, 28, 28) → (batch, 10) logits; 21,840 parameters.

    The network of PyTorch's distributed tutorial (https://docs.pytorch.org/tutorials/intermediate/dist_tuto.html),
    in two halves, so that model-parallel lessons can cut it: `features` → (batch, 320), `classifier` → logits.
    `dropout=0` leaves both dropout layers out of effect, for comparisons that must be exact.
    """

    def __init__(self, dropout: float = 0.0, channels: int = 1, classes: int = 10) -> None:
        super().__init__()
        self.features = nn.Sequential(
            OrderedDict(
                conv1=nn.Conv2d(channels, 10, kernel_size=5),
                pool1=nn.MaxPool2d(2),
                relu1=nn.ReLU(),
                conv2=nn.Conv2d(10, 20, kernel_size=5),
                drop2=nn.Dropout2d(dropout),
                pool2=nn.MaxPool2d(2),
                relu2=nn.ReLU(),
                # Whatever the image's size, the second half gets 20 × 4 × 4; at 28 × 28 this changes nothing.
                fit=nn.AdaptiveAvgPool2d(4),
                flatten=nn.Flatten(),
            )
        )
        self.classifier = nn.Sequential(
            OrderedDict(fc1=nn.Linear(320, 50), relu=nn.ReLU(), drop=nn.Dropout(dropout), fc2=nn.Linear(50, classes))
        )

    def forward(self, images: Tensor) -> Tensor:
        """Return logits, (batch, classes)."""
        logits: Tensor = self.classifier(self.features(images))
        return logits


def pairs(inputs: int = 28 * 28) -> nn.Sequential:
    """A normalisation and two pairs of linear layers: images of `inputs` values → 16 logits; (batch, 16).

    The lessons on sharding cut it: all its sizes divide by 2, 4, 8 and 16 ranks, so that shards are equal.
    """
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        flatten=nn.Flatten(),
        norm=nn.LayerNorm(inputs),
        up1=nn.Linear(inputs, 256),
        relu1=nn.ReLU(),
        down1=nn.Linear(256, 64),
        relu2=nn.ReLU(),
        up2=nn.Linear(64, 256),
        relu3=nn.ReLU(),
        down2=nn.Linear(256, 16),
    )
    return nn.Sequential(layers)


def resnet18(classes: int = 10, cifar_stem: bool = False) -> nn.Module:
    """ResNet-18 from torchvision with `classes` outputs, untrained; otherwise like `resnet50`."""
    from torchvision.models import resnet18 as torchvision_resnet18

    return _with_stem(torchvision_resnet18(weights=None, num_classes=classes), cifar_stem)


def resnet50(classes: int = 10, cifar_stem: bool = False) -> nn.Module:
    """ResNet-50 from torchvision with `classes` outputs, untrained: (batch, 3, height, width) → (batch, classes).

    `cifar_stem` replaces ImageNet's first layers (7 × 7 convolution of stride 2, then max-pooling), which would
    shrink a 32 × 32 image to 8 × 8 at once, by a 3 × 3 convolution of stride 1, as He et al. 2016 do for CIFAR-10
    (https://arxiv.org/abs/1512.03385, section 4.2).
    """
    from torchvision.models import resnet50 as torchvision_resnet50

    return _with_stem(torchvision_resnet50(weights=None, num_classes=classes), cifar_stem)


class Sleep(torch.autograd.Function):
    """Pass values on after a sleep, and their gradients after one twice as long: a device that computes.

    `Sleep.apply(values, forward_s)` stands at the end of a layer where ranks that share cores simulate devices.
    """

    @staticmethod
    def forward(context: Any, values: Tensor, forward_s: float) -> Tensor:
        """Sleep for `forward_s` seconds."""
        context.forward_s = forward_s
        time.sleep(forward_s)
        return values.view_as(values)

    @staticmethod
    def backward(context: Any, gradients: Tensor) -> tuple[Tensor, None]:
        """Sleep for twice as long."""
        time.sleep(2 * context.forward_s)
        return gradients, None


def _with_stem(model: nn.Module, cifar_stem: bool) -> nn.Module:
    if cifar_stem:
        model.conv1 = nn.Conv2d(3, 64, kernel_size=3, stride=1, padding=1, bias=False)
        model.maxpool = nn.Identity()
    return model
