"""Where do ranks wait for each other."""

import time

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import course
from course.pitfalls.base import Exhibit

EXHIBIT = Exhibit(
    wing="well_known",
    title="Where do ranks wait for each other?",
    story="""
    A [guide by
    Lambda](https://github.com/LambdaLabsML/distributed-training-guide/tree/main/02-distributed-data-parallel)
    says: "`optimizer.step()` is a synchronization point across ALL processes"; two of the five
    texts put it at the end of the step too. Here the last rank comes half a second late to
    `backward`. Where does rank 0 wait? (To mend it, make the last rank as late somewhere else in
    the step, where rank 0 need not wait.)
    """,
    choices=(
        "in backward",
        "in optimizer.step",
        "in the next forward",
    ),
    shows=1,
    gives=["backward"],
    expects=[],
    kind="slow",
)


def late_step(worker, images, labels, backward=0.0, step=0.0):
    """A step in which the last rank sleeps before `backward` or before `step`: seconds of each part."""
    late = worker.rank == worker.world_size - 1
    model = DistributedDataParallel(course.models.linear(images[0].numel()))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for warm in (True, False):
        dist.barrier()
        times = [time.perf_counter()]
        loss = cross_entropy(model(images), labels)
        times.append(time.perf_counter())
        time.sleep(backward if late and not warm else 0)
        loss.backward()
        times.append(time.perf_counter())
        time.sleep(step if late and not warm else 0)
        optimizer.step()
        times.append(time.perf_counter())
    return {name: times[i + 1] - times[i] for i, name in enumerate(("forward", "backward", "step"))}


@EXHIBIT.broken
def where_ranks_wait(on_ranks, images, labels):
    seconds = on_ranks(lambda worker: late_step(worker, images, labels, backward=0.5))[0]
    return [part for part, value in seconds.items() if value > 0.25]


@EXHIBIT.right
def right(on_ranks, images, labels):
    """DDP averages gradients during `backward`. (Over NCCL it is the GPU's stream that waits there;
    the host runs ahead.) After it each rank continues alone: if the last
    rank is late to `step`, rank 0 does not wait for it there."""
    seconds, *_, late = on_ranks(lambda worker: late_step(worker, images, labels, step=0.5))
    assert seconds["step"] < late["step"] / 2
    return [part for part, value in seconds.items() if value > 0.25]
