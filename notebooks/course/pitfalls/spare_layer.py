"""A parameter without a gradient: an exhibit of the museum of pitfalls."""

from __future__ import annotations

import torch
from torch import nn

from course.pitfalls.base import Exhibit

EXHIBIT = Exhibit(
    wing="gradients",
    title="A parameter without a gradient",
    story="""
    [*Writing Distributed Applications with
    PyTorch*](https://docs.pytorch.org/tutorials/intermediate/dist_tuto.html) averages
    `param.grad.data` of every parameter. This network has a layer that the loss does not
    use. What is averaged for that layer?
    """,
    choices=(
        "zeros",
        "it is left out",
        "an error",
    ),
    shows=3,
    kind="error",
)


def with_spare_layer():
    model = nn.ModuleDict({"used": nn.Linear(2, 1), "spare": nn.Linear(2, 1)})
    model["used"](torch.ones(1, 2)).sum().backward()
    return model


@EXHIBIT.broken
def spare_layer():
    return [parameter.grad.data.shape for parameter in with_spare_layer().parameters()]


@EXHIBIT.symptom
def symptom(seen):
    return "'NoneType' object has no attribute 'data'" in seen


@EXHIBIT.right
def right():
    """A parameter that was not used has no gradient, not a zero. All ranks must send the
    same tensors, so send zeros."""
    model = with_spare_layer()
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    assert len(grads) == 4
    return [tuple(grad.shape) for grad in grads]
