"""64, per rank or in all."""

from torch.utils.data import DataLoader, DistributedSampler

from course.pitfalls.base import Exhibit

EXHIBIT = Exhibit(
    wing="data",
    title="batch_size=64",
    story="""
    One text compares `DataParallel` with its distributed form, both with `batch_size=64` and
    one learning rate. How many images are in a step of each, with 4 GPUs?
    """,
    choices=(
        "64 and 64",
        "64 and 256",
        "256 and 256",
    ),
    shows=2,
    gives=(64, 256),
    expects=(64, 64),
)


@EXHIBIT.broken
def per_rank_or_in_all():
    one_loader = next(iter(DataLoader(range(1200), 64)))
    four_loaders = [
        DataLoader(range(1200), 64, sampler=DistributedSampler(range(1200), 4, r)) for r in range(4)
    ]
    return len(one_loader), sum(len(next(iter(loader))) for loader in four_loaders)


@EXHIBIT.right
def right():
    """`DataParallel` splits one batch; each rank of DDP has a batch of its own. Compare at the
    same global batch size."""
    loaders = [
        DataLoader(range(1200), 64 // 4, sampler=DistributedSampler(range(1200), 4, r))
        for r in range(4)
    ]
    one_loader = next(iter(DataLoader(range(1200), 64)))
    return len(one_loader), sum(len(next(iter(loader))) for loader in loaders)
