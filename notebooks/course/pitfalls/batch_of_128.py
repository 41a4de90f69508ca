"""A batch of 128, at any number of ranks."""

from torch.utils.data import DataLoader, DistributedSampler

import labkit
from course.pitfalls.base import Exhibit

EXHIBIT = Exhibit(
    wing="data",
    title="A batch of 128, at any number of ranks",
    story="""
    [The text on ResNet-50 and
    SLURM](https://avoid.overfit.cn/post/67095b9014cb40888238b84fea17e872) keeps a batch of 128
    "constant" over 1 to 8 GPUs with `batch_size // size`; an adaptation of [*Writing
    Distributed Applications with
    PyTorch*](https://docs.pytorch.org/tutorials/intermediate/dist_tuto.html) does the same with
    `int(128 / float(size))`. How many images does a step really take?
    """,
    choices=(
        "128 everywhere",
        "126 at 3 and 6 ranks",
        "more than 128 at 3 and 6 ranks",
    ),
    shows=2,
    expects=dict.fromkeys((1, 2, 3, 4, 6, 8), 128),
    kind="wrong, in silence",
)


def images_in_a_step(ranks, rank_batch_size):
    """Count the images that the first batches of all ranks hold."""
    count = 0
    for rank in range(ranks):
        sampler = DistributedSampler(range(12_800), ranks, rank)
        count += len(next(iter(DataLoader(range(12_800), rank_batch_size(rank), sampler=sampler))))
    return count


@EXHIBIT.broken
def batch_of_128():
    return {n: images_in_a_step(n, lambda rank: 128 // n) for n in (1, 2, 3, 4, 6, 8)}


@EXHIBIT.symptom
def symptom(seen):
    return [n for n in seen if seen[n] == 126] == [3, 6] and set(seen.values()) == {126, 128}


@EXHIBIT.right
def right():
    """Distribute the remainder, or require that the batch divides. With `batch_size //
    world_size`, a batch of 128 is 126 images on 3 and on 6 ranks. No image is lost: an epoch
    has more steps. But it is another training run, and each step does less work."""
    for n in (3, 6):
        sampler = DistributedSampler(range(12_800), n, 0)
        steps = len(DataLoader(range(12_800), 128 // n, sampler=sampler))
        assert n * len(sampler) >= 12_800
        assert steps == 12_800 // 128 + 2
    parts = labkit.scaling.split
    return {n: images_in_a_step(n, parts(128, n).__getitem__) for n in (1, 2, 3, 4, 6, 8)}
