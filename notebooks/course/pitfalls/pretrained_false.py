"""pretrained=False."""

import warnings

import torch
import torchvision

from course.pitfalls.base import Exhibit, Expected

EXHIBIT = Exhibit(
    wing="learning",
    title="pretrained=False",
    story="""
    [The text on ResNet-50 and
    SLURM](https://avoid.overfit.cn/post/67095b9014cb40888238b84fea17e872) says
    `resnet50(pretrained=False)`. What does torchvision do? (The network below is on the
    device "meta", where tensors take no memory.)
    """,
    choices=(
        "nothing",
        "a warning",
        "an error",
    ),
    shows=2,
    gives=Expected("a warning", lambda seen: "deprecated" in str(seen)),
    expects=[],
    kind="warning",
)


@EXHIBIT.broken
def pretrained_false():
    with warnings.catch_warnings(record=True) as caught, torch.device("meta"):
        warnings.simplefilter("always")
        torchvision.models.resnet50(pretrained=False)
    return [f"{w.category.__name__}: {w.message}"[:90] for w in caught]


@EXHIBIT.right
def right():
    """The argument is called `weights` since torchvision 0.13, and `None` means random
    weights."""
    with warnings.catch_warnings(record=True) as caught, torch.device("meta"):
        warnings.simplefilter("always")
        torchvision.models.resnet50(weights=None, num_classes=10)
    return [str(w.message) for w in caught]
