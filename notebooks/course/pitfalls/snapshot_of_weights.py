"""A snapshot without the optimizer."""

import torch

import course
from course.pitfalls.base import Exhibit, above
from course.pitfalls.helpers import flat, spread, steps_of

EXHIBIT = Exhibit(
    wing="well_known",
    title="A snapshot of weights and epoch",
    story="""
    PyTorch's page on [fault
    tolerance](https://docs.pytorch.org/tutorials/beginner/ddp_series_fault_tolerance.html) says
    that a snapshot can hold the optimizer's state; the code there saves the weights and the
    epoch. Five steps, a snapshot, and five more: how far is that from ten steps without a break,
    with momentum?
    """,
    choices=(
        "equal",
        "not equal",
    ),
    shows=2,
    gives=above(0.001),
    expects=0,
)


def after_a_break(with_optimizer, folder, images, labels, seed):
    def start():
        torch.manual_seed(seed)
        return course.models.linear(images[0].numel())

    whole, model = start(), start()
    steps_of(whole, images, labels, steps=10)
    optimizer = steps_of(model, images, labels, steps=5)
    file = folder / "snapshot.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)

    snapshot, resumed = torch.load(file), start()
    resumed.load_state_dict(snapshot["model"])
    state = snapshot["optimizer"] if with_optimizer else None
    steps_of(resumed, images, labels, steps=5, state=state)
    return spread([flat(resumed.parameters()), flat(whole.parameters())])


@EXHIBIT.broken
def snapshot_of_weights(folder, images, labels, seed):
    return round(after_a_break(False, folder, images, labels, seed), 4)


@EXHIBIT.right
def right(folder, images, labels, seed):
    """Weights and epoch are enough for that page's plain SGD; momentum is part of the state, too. With the optimizer's state the run continues bit
    for bit."""
    return after_a_break(True, folder, images, labels, seed)
