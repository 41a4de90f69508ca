"""torch.cuda.manual_seed_all."""

import torch

from course.pitfalls.base import Exhibit

EXHIBIT = Exhibit(
    wing="machines",
    title="torch.cuda.manual_seed_all",
    story="""
    A script seeds all GPUs. This machine has none. What does the call do?
    """,
    choices=(
        "an error",
        "nothing",
        "it seeds the CPU",
    ),
    shows=2,
    expects=True,
    why="""
    Without a GPU the call only notes the seed, for a CUDA that may be initialized later. So one
    script can run on both kinds of machines.
    """,
    needs="no GPU",
)


@EXHIBIT.sound
def seeding_gpus(seed):
    before = torch.get_rng_state()
    torch.cuda.manual_seed_all(seed)
    return torch.equal(torch.get_rng_state(), before)
