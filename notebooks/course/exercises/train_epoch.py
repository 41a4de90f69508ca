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


@EXERCISE.wrong("`weight after epoch 0[")
def never_forgets(model: Any, optimizer: Any, batches: Any) -> Any:
    """No zero_grad: gradients of all steps add up."""
    total, samples = 0.0, 0
    for images, labels in batches:
        loss = cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        total += loss.item() * len(labels)
        samples += len(labels)
    return total / samples


@EXERCISE.wrong("nothing has changed it")
def takes_no_step(model: Any, optimizer: Any, batches: Any) -> Any:
    """The optimizer is not called."""
    for images, labels in batches:
        loss = cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
    return loss.item()


@EXERCISE.wrong("that is the loss of the last batch")
def the_last_batch(model: Any, optimizer: Any, batches: Any) -> Any:
    """As many a tutorial prints it."""
    return _plain(model, optimizer, batches)[-1]


@EXERCISE.wrong("a mean over batches, and they are not equally large")
def mean_of_means(model: Any, optimizer: Any, batches: Any) -> Any:
    """Every batch counts alike."""
    losses = _plain(model, optimizer, batches)
    return sum(losses) / len(losses)


@EXERCISE.wrong("that is the sum over the batches")
def the_sum(model: Any, optimizer: Any, batches: Any) -> Any:
    """Not divided."""
    return sum(_plain(model, optimizer, batches))


@EXERCISE.wrong("returned a Tensor, expected a float")
def keeps_the_graph(model: Any, optimizer: Any, batches: Any) -> Any:
    """No item()."""
    return torch.tensor(_plain(model, optimizer, batches)).mean()
