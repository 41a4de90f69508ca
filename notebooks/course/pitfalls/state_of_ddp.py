"""module. in every key."""

from torch.nn.parallel import DistributedDataParallel

import course
from course.pitfalls.base import Exhibit, OnEachRank, has

EXHIBIT = Exhibit(
    wing="learning",
    title="A DDP model's state_dict",
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
    gives=has("Error(s) in loading state_dict"),
    expects=OnEachRank("<All keys matched successfully>"),
    kind="error",
)


@EXHIBIT.broken
def state_of_ddp(on_ranks, images):
    def save_and_load(worker):
        network = course.models.linear(images[0].numel())
        saved = DistributedDataParallel(network).state_dict()
        return str(network.load_state_dict(saved))

    return on_ranks(save_and_load)


@EXHIBIT.right
def right(on_ranks, images):
    """DDP holds the network as its attribute `module`, so each key begins with `module.`. Save
    the network inside: `ddp_model.module.state_dict()`."""

    def save_and_load(worker):
        network = course.models.linear(images[0].numel())
        saved = DistributedDataParallel(network).module.state_dict()
        assert list(saved) == ["1.weight", "1.bias"]
        return str(network.load_state_dict(saved))

    return on_ranks(save_and_load)
