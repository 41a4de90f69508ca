"""A mean of means."""

from torch.nn.functional import cross_entropy

from course.pitfalls.base import Exhibit, above, below
from course.pitfalls.helpers import ten_orders

EXHIBIT = Exhibit(
    wing="learning",
    title="The mean of the batches' losses",
    story="""
    [*Writing Distributed Applications with
    PyTorch*](https://docs.pytorch.org/tutorials/intermediate/dist_tuto.html) adds up the
    mean losses of the batches and divides by the number of batches. The last batch is
    shorter. The images come in ten orders: by how much do the ten losses differ?
    """,
    choices=(
        "by rounding only",
        "by more",
    ),
    shows=2,
    gives=above(0.0001),
    expects=below(1e-6),
)


@EXHIBIT.broken
def loss_of_an_epoch(network, images, labels, seed):
    losses = cross_entropy(network(images), labels, reduction="none").detach()
    batches = [order.split(500) for order in ten_orders(losses, seed)]
    means = [sum(b.mean().item() for b in epoch) / len(epoch) for epoch in batches]
    return round(max(means) - min(means), 4)


@EXHIBIT.right
def right(network, images, labels, seed):
    """Weight each mean by the number of images in its batch."""
    losses = cross_entropy(network(images), labels, reduction="none").detach().double()
    batches = [order.split(500) for order in ten_orders(losses, seed)]
    means = [sum(b.mean().item() * len(b) for b in epoch) / len(losses) for epoch in batches]
    assert abs(means[0] - losses.mean().item()) < 1e-9
    return round(max(means) - min(means), 9)
