"""A thousand classes for ten."""

import math

import torch
from torch.nn.functional import cross_entropy

import course
from course.pitfalls.base import Exhibit, near

EXHIBIT = Exhibit(
    wing="learning",
    title="The first loss",
    story="""
    [The text on ResNet-50 and
    SLURM](https://avoid.overfit.cn/post/67095b9014cb40888238b84fea17e872) takes `resnet50`
    for CIFAR-10, with all of its 1000 outputs. Here a small network with 1000 outputs, on
    ten classes. With what loss does it begin?
    """,
    choices=(
        "ln 10 = 2.3",
        "ln 1000 = 6.9",
        "an error: too many classes",
    ),
    shows=2,
    gives=near(math.log(1000), 0.3),
    expects=near(math.log(10), 0.3),
)


def first_loss(classes, images, labels, seed):
    torch.manual_seed(seed)
    return cross_entropy(course.models.ConvNet(classes=classes)(images), labels).item()


@EXHIBIT.broken
def thousand_classes(images, labels, seed):
    return round(first_loss(1000, images, labels, seed), 2)


@EXHIBIT.right
def right(images, labels, seed):
    """As many outputs as classes. The first loss should be about ln(classes): the cheapest test
    there is."""
    return round(first_loss(10, images, labels, seed), 2)
