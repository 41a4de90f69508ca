"""Only the training loss."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from course.pitfalls.base import Exhibit, above, below
from course.pitfalls.helpers import accuracy, steps_of

EXHIBIT = Exhibit(
    wing="learning",
    title="The training loss, on shuffled labels",
    story="""
    [The text on ResNet-50 and
    SLURM](https://avoid.overfit.cn/post/67095b9014cb40888238b84fea17e872) watches the training
    loss only. Here the labels are random: there is nothing to learn. What does the training
    loss do in 300 steps?
    """,
    choices=(
        "it stays at ln 10 = 2.3",
        "it falls below 1",
    ),
    shows=2,
    gives=below(1.0),
    expects=above(2),
)


def trained_on_shuffled(images, seed):
    """Return a network after 300 steps on images with random labels, and these labels."""
    torch.manual_seed(seed)
    inputs = images[0].numel()
    model = nn.Sequential(nn.Flatten(), nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, 10))
    shuffled = torch.randint(10, (100,))
    steps_of(model, images[:100], shuffled, steps=300)
    return model, shuffled


@EXHIBIT.broken
def shuffled_labels(images, seed):
    model, shuffled = trained_on_shuffled(images, seed)
    return round(cross_entropy(model(images[:100]), shuffled).item(), 2)


@EXHIBIT.right
def right(images, test_images, test_labels, seed):
    """A network with more weights than images can memorise them. Measure the loss on images that
    it has not seen."""
    model, _ = trained_on_shuffled(images, seed)
    assert accuracy(model, test_images, test_labels) < 0.4
    return round(cross_entropy(model(test_images), test_labels).item(), 2)
