"""nvidia-smi, everywhere."""

import subprocess

import torch

from course.pitfalls.base import Exhibit, has

EXHIBIT = Exhibit(
    wing="machines",
    title="nvidia-smi",
    story="""
    [The text on ResNet-50 and
    SLURM](https://avoid.overfit.cn/post/67095b9014cb40888238b84fea17e872) begins with
    `subprocess.run(["nvidia-smi"])`, to see which GPUs there are. An empty search path stands
    for a machine that has no such program. What happens there?
    """,
    choices=(
        "an empty line",
        "exit code 127, and on it goes",
        "an error",
    ),
    shows=3,
    gives=has("FileNotFoundError"),
    expects=lambda: [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    kind="error",
)


@EXHIBIT.broken
def nvidia_smi_everywhere():
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    done = subprocess.run(command, env={"PATH": ""}, capture_output=True, text=True)
    return done.stdout.splitlines()


@EXHIBIT.right
def right():
    """Ask PyTorch: it needs no other program, and lists the GPUs that it can use."""
    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
