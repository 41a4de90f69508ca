"""Training without a step: an exhibit of the museum of pitfalls."""

from __future__ import annotations

import course
from course.pitfalls.base import Exhibit
from course.pitfalls.helpers import flat, steps_of

EXHIBIT = Exhibit(
    wing="learning",
    title="Training without a step",
    story="""
    What one text calls its training process makes a forward pass and prints the outputs.
    How far have the weights moved after that?
    """,
    choices=(
        "a little",
        "not at all",
    ),
    shows=2,
    kind="wrong, in silence",
)


@EXHIBIT.broken
def called_training(images):
    model = course.models.linear(images[0].numel())
    before = flat(model.parameters()).clone()
    model(images)
    return (flat(model.parameters()) - before).abs().max().item()


@EXHIBIT.symptom
def symptom(seen):
    return seen == 0


@EXHIBIT.right
def right(images, labels):
    """A loss, its gradients, and a step of an optimizer: without one of them nothing is
    learnt, and nothing complains."""
    model = course.models.linear(images[0].numel())
    before = flat(model.parameters()).clone()
    steps_of(model, images, labels)
    moved = (flat(model.parameters()) - before).abs().max().item()
    assert moved > 0
    return round(moved, 3)
