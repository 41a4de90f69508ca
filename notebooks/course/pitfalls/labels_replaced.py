"""A loss that does not look."""

from torch import nn
from torch.nn.functional import cross_entropy

from course.pitfalls.base import Exhibit, above

EXHIBIT = Exhibit(
    wing="well_known",
    title="log_softmax, summed",
    story="""
    The script of *Whose images?* takes the mean of `log_softmax(output).sum(dim=1)` for its
    loss. How much does it change if every label is replaced by another?
    """,
    choices=(
        "much",
        "not at all",
    ),
    shows=2,
    gives=0,
    expects=above(0),
)


@EXHIBIT.broken
def labels_replaced(images, labels, network):
    def loss_of(targets):
        return nn.functional.log_softmax(network(images), dim=1).sum(dim=1).mean().item()

    return abs(loss_of(labels) - loss_of(9 - labels))


@EXHIBIT.right
def right(images, labels, network):
    """The loss never uses the targets. Take the logarithm at the target's place, as
    `cross_entropy` does."""

    def loss_of(targets):
        return (
            -nn.functional.log_softmax(network(images), dim=1)
            .gather(1, targets[:, None])
            .mean()
            .item()
        )

    assert abs(loss_of(labels) - cross_entropy(network(images), labels).item()) < 1e-5
    return round(abs(loss_of(labels) - loss_of(9 - labels)), 3)
