"""A parameter without a gradient."""

import torch
from torch import nn

from course.pitfalls.base import Exhibit, has

EXHIBIT = Exhibit(
    wing="gradients",
    title="param.grad.data of every parameter",
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
    gives=has("'NoneType' object has no attribute 'data'"),
    expects=[(1, 2), (1,), (1, 2), (1,)],
    kind="error",
)


def with_spare_layer():
    model = nn.ModuleDict({"used": nn.Linear(2, 1), "spare": nn.Linear(2, 1)})
    model["used"](torch.ones(1, 2)).sum().backward()
    return model


@EXHIBIT.broken
def spare_layer():
    return [parameter.grad.data.shape for parameter in with_spare_layer().parameters()]


@EXHIBIT.right
def right():
    """An unused parameter's gradient is `None`, not zero. All ranks must call the same
    collectives, so send zeros."""
    model = with_spare_layer()
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    assert [grad.abs().sum() > 0 for grad in grads] == [True, True, False, False]
    return [tuple(grad.shape) for grad in grads]
