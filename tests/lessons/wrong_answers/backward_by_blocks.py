"""Wrong answers to `backward_by_blocks`, and a piece of what each must be told."""

import torch

from course.exercises.backward_by_blocks import _plain, backward_by_blocks, draws_anew
from tests.support.wrong_answers import told


@told("B were kept for the backward pass at once")
def keeps_everything(blocks, x, gradient):
    """A plain pass."""
    return _plain(blocks, x, gradient)


told("dropout has dropped other numbers the second time")(draws_anew)


@told("that is the gradient of the last block's output")
def goes_nowhere(blocks, x, gradient):
    """No backward pass."""
    return gradient


@told("expected the parameter's gradient")
def only_of_the_input(blocks, x, gradient):
    """`torch.autograd.grad` fills in no `.grad`."""
    x = x.clone().requires_grad_()
    return torch.autograd.grad(blocks(x), x, gradient)[0]


@told("`x` was changed")
def works_on_the_input(blocks, x, gradient):
    """In place."""
    found = backward_by_blocks(blocks, x, gradient)
    x.zero_()
    return found
