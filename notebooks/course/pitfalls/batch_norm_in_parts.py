"""BatchNorm on a few images."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from course.pitfalls.base import Exhibit, above, below
from course.pitfalls.helpers import flat

EXHIBIT = Exhibit(
    wing="learning",
    title="BatchNorm at 8 ranks",
    story="""
    At 8 ranks [the text on ResNet-50 and
    SLURM](https://avoid.overfit.cn/post/67095b9014cb40888238b84fea17e872) has 16 images per
    rank, and `BatchNorm` sees only these. The gradient is averaged over eight parts of a batch
    of 128. How far is it from that of the whole batch?
    """,
    choices=(
        "equal up to rounding",
        "another gradient",
    ),
    shows=2,
    gives=above(0.01),
    expects=below(1e-9),
)


def error_in_parts(norm, images, labels, seed):
    torch.manual_seed(seed)
    first, last = nn.Linear(images[0].numel(), 16), nn.Linear(16, 10)
    model = nn.Sequential(nn.Flatten(), first, norm, nn.ReLU(), last).double()

    def gradient(parts):
        model.zero_grad()
        x, y = images[:128].double().chunk(parts), labels[:128].chunk(parts)
        sum(cross_entropy(model(a), b) / parts for a, b in zip(x, y, strict=True)).backward()
        return flat(parameter.grad for parameter in model.parameters())

    return ((gradient(8) - gradient(1)).norm() / gradient(1).norm()).item()


@EXHIBIT.broken
def batch_norm_in_parts(images, labels, seed):
    return round(error_in_parts(nn.BatchNorm1d(16), images, labels, seed), 4)


@EXHIBIT.right
def right(images, labels, seed):
    """Normalise each image by itself, by `GroupNorm` say, and the split changes nothing. On GPUs
    `nn.SyncBatchNorm` takes the statistics over all ranks. Lesson 12 has both in full."""
    error = error_in_parts(nn.GroupNorm(1, 16), images, labels, seed)
    assert error < error_in_parts(nn.BatchNorm1d(16), images, labels, seed)
    return error
