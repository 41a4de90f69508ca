"""My loss."""

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from course.pitfalls.base import Exhibit
from course.pitfalls.helpers import part_of

EXHIBIT = Exhibit(
    wing="learning",
    title="loss.item() on each rank",
    story="""
    [The text on ResNet-50 and
    SLURM](https://avoid.overfit.cn/post/67095b9014cb40888238b84fea17e872) prints the loss on
    rank 0; another text prints each rank's own. All ranks have equal weights. How many
    different losses do the ranks have?
    """,
    choices=(
        "one",
        "as many as ranks",
    ),
    shows=2,
    gives=lambda world_size: world_size,
    expects=1,
)


@EXHIBIT.broken
def my_loss(on_ranks, network, images, labels):
    def rank_loss(worker):
        return cross_entropy(network(part_of(worker, images)), part_of(worker, labels)).item()

    return len({round(loss, 6) for loss in on_ranks(rank_loss)})


@EXHIBIT.right
def right(on_ranks, network, images, labels):
    """Sum losses and counts over all ranks, then divide."""

    def mean_loss(worker):
        logits, mine = network(part_of(worker, images)), part_of(worker, labels)
        total = torch.tensor([cross_entropy(logits, mine, reduction="sum").item(), len(mine)])
        dist.all_reduce(total)
        return (total[0] / total[1]).item()

    ours, whole = on_ranks(mean_loss), cross_entropy(network(images), labels).item()
    assert all(abs(loss - whole) < 1e-5 for loss in ours)
    return len({round(loss, 6) for loss in ours})
