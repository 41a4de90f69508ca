"""set_epoch, forgotten."""

from torch.utils.data import DistributedSampler

from course.pitfalls.base import Exhibit

EXHIBIT = Exhibit(
    wing="data",
    title="A DistributedSampler over three epochs",
    story="""
    [The text on ResNet-50 and
    SLURM](https://avoid.overfit.cn/post/67095b9014cb40888238b84fea17e872) has a
    `DistributedSampler`, which shuffles, and a plain loop over the epochs. How many different
    orders are there in three epochs?
    """,
    choices=(
        "3",
        "2",
        "1",
    ),
    shows=3,
    gives=1,
    expects=3,
)


@EXHIBIT.broken
def three_epochs(world_size, seed):
    sampler = DistributedSampler(range(1000), world_size, 0, seed=seed)
    return len({tuple(sampler) for epoch in range(3)})


@EXHIBIT.right
def right(world_size, seed):
    """The sampler shuffles by seed + epoch, and does not count epochs: call `set_epoch`."""
    sampler = DistributedSampler(range(1000), world_size, 0, seed=seed)
    orders = set()
    for epoch in range(3):
        sampler.set_epoch(epoch)
        orders.add(tuple(sampler))
    return len(orders)
