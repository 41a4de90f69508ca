"""Exercise: the training loop."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from course.exercises.base import Exercise
from course.exercises.trial import Trial

EXERCISE = Exercise(
    lesson="01",
    title="The loop",
    statement="""
    Train for one epoch: for each `(images, labels)` of `batches`, compute the loss, `cross_entropy(model(images),
    labels)`, its gradients, and take one step of the `optimizer`. Return the epoch's loss, a float: the mean over all
    *samples*, each batch's loss being the mean over its own. The last batch may be smaller than the others.
    """,
    hints=(
        "`backward` *adds* to the gradients that are there: `optimizer.zero_grad()` comes before it in every step.",
        "A batch's loss is a mean, so weight it: `loss.item() * len(labels)`. And `.item()`: a tensor would keep its "
        "graph, and all that hangs on it.",
    ),
    why="The loss of the last batch says little about an epoch, and a mean of means counts samples of a small batch "
    "for more.",
    world_sizes=(),
    imports=("from torch.nn.functional import cross_entropy",),
    cases=({"sizes": (4, 4, 2)}, {"sizes": (3, 1)}, {"sizes": (5,)}),
)


@EXERCISE.reference
def train_epoch(model, optimizer, batches):
    """Take one step for each (images, labels) of `batches`; return the mean loss over all samples, a float."""
    total = samples = 0
    for images, labels in batches:
        loss = cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item() * len(labels)
        samples += len(labels)
    return total / samples


def _plain(model: nn.Module, optimizer: Any, batches: Any) -> list[float]:
    losses = []
    for images, labels in batches:
        optimizer.zero_grad()
        loss = cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _start() -> tuple[nn.Linear, Any]:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@EXERCISE.trial
def trial(t: Trial, sizes: tuple[int, ...]) -> None:
    """Train two epochs, and compare losses and weights."""
    batches = [
        (t.numbers(size, 4, salt=f"{i}") / 50, t.numbers(size, salt=f"label {i}").long() % 3)
        for i, size in enumerate(sizes)
    ]
    (model, optimizer), (plain, plain_optimizer) = _start(), _start()
    for epoch in range(2):
        before = plain.weight.detach().clone()
        found = t.call(model, optimizer, batches)
        losses = _plain(plain, plain_optimizer, batches)
        what = f"weight after epoch {epoch}"
        t.equal(what, model.weight, plain.weight.detach(), before)
        t.require(isinstance(found, float), f"returned a {type(found).__name__}, expected a float")
        true = sum(loss * size for loss, size in zip(losses, sizes, strict=True)) / sum(sizes)
        known = {
            "that is the loss of the last batch": torch.tensor(losses[-1]),
            "that is the sum over the batches": torch.tensor(sum(losses)),
            "a mean over batches, and they are not equally large": torch.tensor(sum(losses) / len(losses)),
        }
        t.equal(f"loss of epoch {epoch}", torch.tensor(found), torch.tensor(true), known=known)


# No zero_grad: gradients of all steps add up.
EXERCISE.slip("never_forgets", "`weight after epoch 0[", ("optimizer.zero_grad()", "pass"))

# The optimizer is not called.
EXERCISE.slip("takes_no_step", "nothing has changed it", ("optimizer.step()", "pass"))

# As many a tutorial prints it.
EXERCISE.slip("the_last_batch", "that is the loss of the last batch", ("return total / samples", "return loss.item()"))

# Every batch counts alike.
EXERCISE.slip(
    "mean_of_means",
    "a mean over batches, and they are not equally large",
    ("loss.item() * len(labels)", "loss.item()"),
    ("samples += len(labels)", "samples += 1"),
)

# Not divided.
EXERCISE.slip(
    "the_sum",
    "that is the sum over the batches",
    ("loss.item() * len(labels)", "loss.item()"),
    ("return total / samples", "return total"),
)

# No item().
EXERCISE.slip("keeps_the_graph", "returned a Tensor, expected a float", ("loss.item()", "loss"))
