"""Only the training loss: an exhibit of the museum of pitfalls."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from course.pitfalls.base import Exhibit
from course.pitfalls.helpers import accuracy, steps_of

EXHIBIT = Exhibit(
    wing="learning",
    title="Only the training loss",
    story="""
    [The text on ResNet-50 and
    SLURM](https://avoid.overfit.cn/post/67095b9014cb40888238b84fea17e872) looks at the training
    loss only. Here the labels are shuffled, so that there is nothing to learn. What does the
    training loss do in 300 steps?
    """,
    choices=(
        "it stays at ln 10 = 2.3",
        "it falls, all the same",
    ),
    shows=2,
    kind="wrong, in silence",
)


def learnt_by_heart(images, seed):
    """Give a network after 300 steps on images whose labels are drawn by chance, and these labels."""
    torch.manual_seed(seed)
    inputs = images[0].numel()
    model = nn.Sequential(nn.Flatten(), nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, 10))
    shuffled = torch.randint(10, (100,))
    steps_of(model, images[:100], shuffled, steps=300)
    return model, shuffled


@EXHIBIT.broken
def shuffled_labels(images, seed):
    model, shuffled = learnt_by_heart(images, seed)
    return round(cross_entropy(model(images[:100]), shuffled).item(), 2)


@EXHIBIT.symptom
def symptom(seen):
    return seen < 1.0


@EXHIBIT.right
def right(images, test_images, test_labels, seed):
    """A network with more weights than images learns them by heart. Only images that it has
    not seen can tell."""
    model, _ = learnt_by_heart(images, seed)
    found = accuracy(model, test_images, test_labels)
    assert found < 0.4
    return f"accuracy on other images: {found:.2f}"
