"""A batch of 128, at any number of ranks."""

import torch
from torch.utils.data import DataLoader, DistributedSampler

from course.pitfalls.base import Exhibit, Expected


def symptom(seen):
    return [n for n in seen if seen[n] == 126] == [3, 6] and set(seen.values()) == {126, 128}


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
    gives=Expected("126 on 3 and 6 ranks", symptom),
    expects=dict.fromkeys((1, 2, 3, 4, 6, 8), 128),
)


def images_in_steps(loaders):
    """Count the images of all ranks in each step. ValueError if a rank has more steps than others."""
    return [sum(map(len, batches)) for batches in zip(*loaders, strict=True)]


def loader(rank, n):
    sampler = DistributedSampler(range(12_800), n, rank)
    return DataLoader(range(12_800), 128 // n, sampler=sampler)


@EXHIBIT.broken
def batch_of_128():
    return {
        n: images_in_steps([loader(rank, n) for rank in range(n)])[0] for n in (1, 2, 3, 4, 6, 8)
    }


@EXHIBIT.right
def right():
    """Require that the batch divides; or cut each batch itself into parts, here of 43, 43 and 42
    images, and weight the ranks' gradients by them. (Loaders of 43, 43 and 42 images over a
    `DistributedSampler` have unequally many steps.) With `batch_size // world_size`, a batch of
    128 is 126 images on 3 and on 6 ranks. No image is lost: an epoch has more steps. But it is
    another training run, and each step does less work."""
    assert {len(loader(rank, n)) for n in (3, 6) for rank in range(n)} == {102}

    def steps(n):
        batches = torch.randperm(12_800).split(128)
        return images_in_steps([[b.tensor_split(n)[rank] for b in batches] for rank in range(n)])

    assert steps(3) == [128] * 100
    return {n: steps(n)[0] for n in (1, 2, 3, 4, 6, 8)}
