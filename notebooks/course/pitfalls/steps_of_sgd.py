"""A learning rate of 0.0001."""

import torch
from torch.nn.functional import cross_entropy

import course
from course.pitfalls.base import Exhibit, above, below
from course.pitfalls.helpers import accuracy

EXHIBIT = Exhibit(
    wing="learning",
    title="SGD, 0.0001, 782 steps",
    story="""
    [The text on ResNet-50 and
    SLURM](https://avoid.overfit.cn/post/67095b9014cb40888238b84fea17e872) trains with plain
    SGD, a rate of 1e-4 and two epochs, 782 steps. Here a small network takes as many steps
    on digits. What is its test accuracy?
    """,
    choices=(
        "about .1, by chance",
        "about .5",
        "about .9",
    ),
    shows=1,
    gives=below(0.3),
    expects=above(0.6),
)


def take_782_steps(images, labels, seed, **options):
    torch.manual_seed(seed)
    model = course.models.ConvNet()
    optimizer = torch.optim.SGD(model.parameters(), **options)
    for _ in range(782):
        chosen = torch.randint(len(images), (8,))
        optimizer.zero_grad()
        cross_entropy(model(images[chosen]), labels[chosen]).backward()
        optimizer.step()
    return model


@EXHIBIT.broken
def steps_of_sgd(images, labels, test_images, test_labels, seed):
    model = take_782_steps(images, labels, seed, lr=1e-4, momentum=0.0)
    return round(accuracy(model, test_images, test_labels), 2)


@EXHIBIT.right
def right(images, labels, test_images, test_labels, seed):
    """A learning rate a hundred times as large, with momentum, learns in the same steps; a ResNet
    takes 0.1. Try a few rates before the long run."""
    model = take_782_steps(images, labels, seed, lr=0.01, momentum=0.9)
    return round(accuracy(model, test_images, test_labels), 2)
