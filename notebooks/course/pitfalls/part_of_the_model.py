"""Which part of the model is mine."""

from torch.nn.parallel import DistributedDataParallel

import course
from course.pitfalls.base import Exhibit, below

EXHIBIT = Exhibit(
    wing="gradients",
    title="A rank's share of the parameters",
    story="""
    [The text on ResNet-50 and
    SLURM](https://avoid.overfit.cn/post/67095b9014cb40888238b84fea17e872) says that DDP
    partitions the parameters between the nodes. What share of the parameters does a rank of
    DDP hold?
    """,
    choices=(
        "1 / the number of ranks",
        "1: all of them",
    ),
    shows=2,
    gives=1,
    expects=below(1),
)


@EXHIBIT.broken
def part_of_the_model(on_ranks, images):
    def share(worker):
        model = course.models.linear(images[0].numel())
        count = sum(p.numel() for p in model.parameters())
        return sum(p.numel() for p in DistributedDataParallel(model).parameters()) / count

    return on_ranks(share)[-1]


@EXHIBIT.right
def right(on_ranks, images):
    """With DDP every rank holds the whole model, and the sampler splits the data. FSDP splits the
    model: lesson 09."""

    def share(worker):
        from torch.distributed.fsdp import fully_shard

        model = course.models.linear(images[0].numel())
        count = sum(p.numel() for p in model.parameters())
        return sum(p.to_local().numel() for p in fully_shard(model).parameters()) / count

    shares = on_ranks(share)
    assert abs(sum(shares) - 1) < 1e-9
    return round(shares[-1], 3)
