"""num_workers is not the number of ranks."""

from torch.utils.data import DataLoader, DistributedSampler

from course.pitfalls.base import Exhibit

EXHIBIT = Exhibit(
    wing="data",
    title="num_workers=2 on two ranks",
    story="""
    One text says that `num_workers` makes each process see its own part of the data. Two ranks
    have loaders with two workers each, over 100 samples. How many samples do both ranks get?
    """,
    choices=(
        "none",
        "50",
        "100",
    ),
    shows=3,
    gives=100,
    expects=0,
)


@EXHIBIT.broken
def num_workers_2():
    rank_0, rank_1 = ({int(x) for x in DataLoader(range(100), num_workers=2)} for rank in range(2))
    return len(rank_0 & rank_1)


@EXHIBIT.right
def right():
    """`num_workers` is the number of one rank's loader processes. The sampler decides which rank gets which
    sample."""
    rank_0, rank_1 = (
        {int(x) for x in DataLoader(range(100), sampler=DistributedSampler(range(100), 2, rank))}
        for rank in range(2)
    )
    assert rank_0 | rank_1 == set(range(100))
    return len(rank_0 & rank_1)
