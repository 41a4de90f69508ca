"""loss.item() after optimizer.step()."""

import torch
from torch.nn.functional import cross_entropy

from course.pitfalls.base import Exhibit

EXHIBIT = Exhibit(
    wing="learning",
    title="loss.item() after optimizer.step()",
    story="""
    The loss is read after `backward` and `step`, when the weights have changed. How far is it
    from the loss that was read before `backward`?
    """,
    choices=(
        "equal",
        "lower: the weights are better",
        "an error: the graph is gone",
    ),
    shows=1,
    expects=0,
    why="""
    The loss is a tensor of its own, computed in the forward pass. `backward` frees the graph, not
    its result, and `step` changes only the parameters.
    """,
)


@EXHIBIT.sound
def loss_read_late(network, images, labels):
    optimizer = torch.optim.SGD(network.parameters(), 0.1)
    loss = cross_entropy(network(images), labels)
    before = loss.item()
    loss.backward()
    optimizer.step()
    return loss.item() - before
