"""ImageNet's first layers on small images."""

import torch
import torchvision

import course
from course.pitfalls.base import Exhibit

EXHIBIT = Exhibit(
    wing="learning",
    title="resnet50 on images of 32 × 32",
    story="""
    [The text on ResNet-50 and
    SLURM](https://avoid.overfit.cn/post/67095b9014cb40888238b84fea17e872) gives the 32 × 32
    images of CIFAR-10 to an unchanged `resnet50`. How large are the feature maps of its
    last stage?
    """,
    choices=(
        "1 × 1",
        "4 × 4",
        "8 × 8",
    ),
    shows=1,
    gives=(1, 1),
    expects=(4, 4),
)


def last_picture(model):
    sizes = []
    model.layer4.register_forward_hook(
        lambda layer, before, after: sizes.append(tuple(after.shape[2:]))
    )
    model.to("meta")(torch.zeros(2, 3, 32, 32, device="meta"))
    return sizes[0]


@EXHIBIT.broken
def imagenet_stem():
    return last_picture(torchvision.models.resnet50(weights=None))


@EXHIBIT.right
def right():
    """The first layers reduce height and width to a quarter. For small images, replace them by a
    3 × 3 convolution of stride 1, as in the paper's own experiments with CIFAR-10."""
    return last_picture(course.models.resnet50(cifar_stem=True))
