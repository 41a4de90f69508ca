"""non_blocking=True, and used at once."""

import torch

from course.pitfalls.base import Exhibit

EXHIBIT = Exhibit(
    wing="machines",
    title="non_blocking=True, and used at once",
    story="""
    A batch is copied to the device with `non_blocking=True`, and the next line multiplies it:
    nothing waits for the copy. How far is the product from that of the CPU? (Without a GPU the
    device is the CPU.)
    """,
    choices=(
        "equal",
        "it differs, from run to run",
    ),
    shows=1,
    expects=0,
    why="""
    Copy and product are queued on the same CUDA stream, and run in order. Copies to the *CPU*
    are another matter: read their result only after a synchronization.
    """,
)


@EXHIBIT.sound
def non_blocking():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.arange(1_000_000.0)
    product = x.to(device, non_blocking=True) * 2
    return (product.cpu() - x * 2).abs().max().item()
