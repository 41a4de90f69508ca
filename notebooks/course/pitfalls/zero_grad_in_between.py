"""zero_grad between forward and backward."""

import torch
from torch.nn.functional import cross_entropy

import course
from course.pitfalls.base import Exhibit
from course.pitfalls.helpers import flat, spread, steps_of

EXHIBIT = Exhibit(
    wing="learning",
    title="zero_grad between forward and backward",
    story="""
    `optimizer.zero_grad()` comes after the forward pass, just before `backward`. After five steps,
    how far are the weights from those of the usual order?
    """,
    choices=(
        "equal",
        "far: the gradients are lost",
        "far: gradients add up",
    ),
    shows=1,
    expects=0,
    why="""
    The forward pass neither reads nor writes `.grad`. `zero_grad` may stand anywhere between one
    step and the next backward pass.
    """,
)


@EXHIBIT.sound
def zero_grad_in_between(network, images, labels):
    usual = course.models.linear(images[0].numel())
    usual.load_state_dict(network.state_dict())
    steps_of(usual, images, labels)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
    for _ in range(5):
        loss = cross_entropy(network(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return spread([flat(network.parameters()), flat(usual.parameters())])
