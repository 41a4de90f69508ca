"""Resumed at epoch 0."""

import torch

import course
from course.pitfalls.base import Exhibit
from course.pitfalls.helpers import flat, steps_of

EXHIBIT = Exhibit(
    wing="learning",
    title="Killed after 2 of 4 epochs",
    story="""
    The checkpoint of [the text on ResNet-50 and
    SLURM](https://avoid.overfit.cn/post/67095b9014cb40888238b84fea17e872) has weights, and no
    epoch. A run of 4 epochs is killed after 2, and resumed to the end. How many epochs has it
    trained in total?
    """,
    choices=(
        "2",
        "4",
        "6",
    ),
    shows=3,
    gives=6,
    expects=4,
)


def train(file, until, keeps_epoch, images, labels):
    """Resume from the file and train up to epoch `until`; return the epochs trained now, and the weights."""
    torch.manual_seed(0)
    model, trained = course.models.linear(images[0].numel()), []
    saved = torch.load(file) if file.exists() else {"model": model.state_dict()}
    model.load_state_dict(saved["model"])
    for epoch in range(saved.get("epoch", 0), until):
        steps_of(model, images, labels, steps=1)
        trained.append(epoch)
        kept = {"model": model.state_dict()} | ({"epoch": epoch + 1} if keeps_epoch else {})
        torch.save(kept, file)
    return trained, flat(model.parameters())


@EXHIBIT.broken
def four_epochs_in_two_runs(folder, images, labels):
    file = folder / "weights.pt"
    killed, _ = train(file, 2, False, images, labels)
    resumed, _ = train(file, 4, False, images, labels)
    return len(killed) + len(resumed)


@EXHIBIT.right
def right(folder, images, labels):
    """Save the epoch too, and all other state: optimizer, schedule, random number generators.
    Lesson 13 does."""
    killed, _ = train(folder / "killed.pt", 2, True, images, labels)
    resumed, weights = train(folder / "killed.pt", 4, True, images, labels)
    whole, never_killed = train(folder / "whole.pt", 4, True, images, labels)
    assert killed + resumed == whole
    assert torch.equal(weights, never_killed)
    return len(killed) + len(resumed)
