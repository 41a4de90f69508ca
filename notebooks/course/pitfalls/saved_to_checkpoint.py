"""A folder that nobody made: an exhibit of the museum of pitfalls."""

from __future__ import annotations

import torch

from course.pitfalls.base import Exhibit

EXHIBIT = Exhibit(
    wing="learning",
    title="A folder that nobody made",
    story="""
    After the first epoch [the text on ResNet-50 and
    SLURM](https://avoid.overfit.cn/post/67095b9014cb40888238b84fea17e872) saves to
    `./checkpoint/…`, a folder that nothing has made. What happens?
    """,
    choices=(
        "the folder is made",
        "an error, after a whole epoch",
        "nothing is saved",
    ),
    shows=2,
    kind="error",
)


@EXHIBIT.broken
def saved_to_checkpoint(folder):
    torch.save({"epoch": 0}, folder / "checkpoint" / "1GPU_0epoch.checkpoint")


@EXHIBIT.symptom
def symptom(seen):
    return "does not exist" in seen or "No such file" in seen


@EXHIBIT.right
def right(folder):
    """Make it, on rank 0, before the first epoch."""
    place = folder / "checkpoints" / "1GPU_0epoch.checkpoint"
    place.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"epoch": 0}, place)
    assert torch.load(place)["epoch"] == 0
    return place.name
