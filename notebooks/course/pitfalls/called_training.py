"""Training without a step."""

import course
from course.pitfalls.base import Exhibit, above
from course.pitfalls.helpers import flat, steps_of

EXHIBIT = Exhibit(
    wing="learning",
    title="What one text calls training",
    story="""
    What one text calls its training process makes a forward pass and prints the outputs.
    How far have the weights moved after that?
    """,
    choices=(
        "a little",
        "not at all",
    ),
    shows=2,
    gives=0,
    expects=above(0),
)


@EXHIBIT.broken
def called_training(images):
    model = course.models.linear(images[0].numel())
    before = flat(model.parameters()).clone()
    model(images)
    return (flat(model.parameters()) - before).abs().max().item()


@EXHIBIT.right
def right(images, labels):
    """Training is a loss, a backward pass and an optimizer step. Without one of them nothing is
    learnt, and no error is raised."""
    model = course.models.linear(images[0].numel())
    before = flat(model.parameters()).clone()
    steps_of(model, images, labels)
    assert all(parameter.grad is not None for parameter in model.parameters())
    return round((flat(model.parameters()) - before).abs().max().item(), 3)
