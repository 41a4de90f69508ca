"""A folder that nobody made."""

import torch

from course.pitfalls.base import Exhibit, has

EXHIBIT = Exhibit(
    wing="learning",
    title="torch.save to ./checkpoint",
    story="""
    After the first epoch [the text on ResNet-50 and
    SLURM](https://avoid.overfit.cn/post/67095b9014cb40888238b84fea17e872) saves to
    `./checkpoint/…`. No line of it creates that folder. What happens?
    """,
    choices=(
        "the folder is created",
        "an error, after a whole epoch",
        "nothing is saved",
    ),
    shows=2,
    gives=has("does not exist", "No such file"),
    expects=0,
    kind="error",
)


@EXHIBIT.broken
def saved_to_checkpoint(folder):
    place = folder / "checkpoint" / "1GPU_0epoch.checkpoint"
    torch.save({"epoch": 0}, place)
    return torch.load(place)["epoch"]


@EXHIBIT.right
def right(folder):
    """Create the folder before the first epoch, on rank 0."""
    place = folder / "checkpoint" / "1GPU_0epoch.checkpoint"
    place.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"epoch": 0}, place)
    return torch.load(place)["epoch"]
