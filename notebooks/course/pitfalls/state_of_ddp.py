"""module. in every key: an exhibit of the museum of pitfalls."""

from __future__ import annotations

from torch.nn.parallel import DistributedDataParallel

import course
from course.pitfalls.base import Exhibit

EXHIBIT = Exhibit(
    wing="learning",
    title="module. in every key",
    story="""
    [The text on ResNet-50 and
    SLURM](https://avoid.overfit.cn/post/67095b9014cb40888238b84fea17e872) saves
    `ddp_model.state_dict()`. Then somebody loads that into the bare network, to use it.
    Does it fit?
    """,
    choices=(
        "it loads",
        "it loads nothing, without an error",
        "an error about keys",
    ),
    shows=3,
    kind="error",
)


@EXHIBIT.broken
def state_of_ddp(on_ranks, images):
    def save_and_load(worker):
        network = course.models.linear(images[0].numel())
        saved = DistributedDataParallel(network).state_dict()
        network.load_state_dict(saved)

    return on_ranks(save_and_load)


@EXHIBIT.symptom
def symptom(seen):
    return "Error(s) in loading state_dict" in seen


@EXHIBIT.right
def right(on_ranks, images):
    """DDP keeps the network as its child `module`, and each key says so. Save the network
    inside."""

    def save_and_load(worker):
        network = course.models.linear(images[0].numel())
        saved = DistributedDataParallel(network).module.state_dict()
        network.load_state_dict(saved)
        return list(saved)

    keys = on_ranks(save_and_load)[0]
    assert keys == ["1.weight", "1.bias"]
    return keys
