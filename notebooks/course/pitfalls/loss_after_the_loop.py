"""The last batch speaks for the epoch."""

from torch.nn.functional import cross_entropy

from course.pitfalls.base import Exhibit, above, below
from course.pitfalls.helpers import ten_orders

EXHIBIT = Exhibit(
    wing="learning",
    title="loss.item() after the loop",
    story="""
    Both examples of one text print `loss.item()` after the loop over the batches, as the
    epoch's loss. Below, the network does not change, so the epoch's loss is one number;
    only the order of the batches is left to chance. By how much does the printed loss
    differ over ten orders?
    """,
    choices=(
        "not at all",
        "below 0.01",
        "more",
    ),
    shows=3,
    gives=above(0.01),
    expects=below(1e-6),
)


@EXHIBIT.broken
def loss_after_the_loop(network, images, labels, seed):
    losses = cross_entropy(network(images), labels, reduction="none").detach()
    last = [order.split(64)[-1].mean().item() for order in ten_orders(losses, seed)]
    return round(max(last) - min(last), 3)


@EXHIBIT.right
def right(network, images, labels, seed):
    """Sum the losses of all images, and divide by their number: equal in every order."""
    losses = cross_entropy(network(images), labels, reduction="none").detach().double()
    means = [order.sum().item() / len(order) for order in ten_orders(losses, seed)]
    assert abs(means[0] - cross_entropy(network(images), labels).item()) < 1e-5
    return round(max(means) - min(means), 9)
