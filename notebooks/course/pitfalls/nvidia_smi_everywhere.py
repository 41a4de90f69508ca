"""nvidia-smi, everywhere: an exhibit of the museum of pitfalls."""

from __future__ import annotations

import subprocess

import torch

from course.pitfalls.base import Exhibit

EXHIBIT = Exhibit(
    wing="machines",
    title="nvidia-smi, everywhere",
    story="""
    [The text on ResNet-50 and
    SLURM](https://avoid.overfit.cn/post/67095b9014cb40888238b84fea17e872) begins with
    `subprocess.run(["nvidia-smi"])`. An empty search path stands for a machine that has no such
    program. What happens there?
    """,
    choices=(
        "an empty line",
        "exit code 127, and on it goes",
        "an error",
    ),
    shows=3,
    kind="error",
)


@EXHIBIT.broken
def nvidia_smi_everywhere():
    return subprocess.run(["nvidia-smi"], env={"PATH": ""}, capture_output=True)


@EXHIBIT.symptom
def symptom(seen):
    return seen.startswith("FileNotFoundError")


@EXHIBIT.right
def right():
    """Ask PyTorch, which knows what it can use, and needs no program for it."""
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    assert bool(names) == torch.cuda.is_available()
    return names or "no GPU"
