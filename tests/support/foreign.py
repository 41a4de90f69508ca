"""Programs that nobody here wrote, with nothing of theirs changed: by torchrun or `python`, and by `labkit.run_script`.

Nothing is fetched: LABKIT_PROGRAMS is a folder with copies of the repositories, those that somebody has. Programs that
want several GPUs get pretended ones, which are the CPU (`tests.pretended_gpu`). What they print, as far as it does not
depend on the clock or on chance, must be the same both ways, and both must end well:

    LABKIT_WIDE=1 LABKIT_PROGRAMS=programs python -m pytest tests/whole/test_foreign.py
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from tests import pretended_gpu
from tests.support.ports import free_ports

LONG_S = 900
LAUNCH = """
import atexit, json, os, sys
import labkit
what = json.loads(sys.argv[1])
call = labkit.run_module if what["is_module"] else labkit.run_script
run = call(what["name"], *what["arguments"], world_size=what["world_size"], live=False)
print(*run.output, sep="\\n", flush=True)
atexit._run_exitfuncs()
os._exit(0)
"""
"""What a reader's cell says; in a program, so that GPUs can be pretended for the notebook, too.

It ends as ranks do: where GPUs are pretended, a thread that Python leaves behind may abort the process as Python ends.
"""


class Program(NamedTuple):
    """One public program."""

    title: str
    folder: str
    """Within the programs: what is copied, and where it is run. Empty where an installed package has the module."""
    name: str
    """The script, or the module."""
    arguments: tuple[str, ...] = ()
    said: str = r"(?i).*loss.*"
    """A pattern: what of its output is compared."""
    gpus: int = 0
    """Pretended ones."""
    world_size: int = 2
    """1: it starts its processes itself, as `python` runs it."""
    is_module: bool = False
    data: Callable[[Path], None] | None = None
    """Makes in the copy what the program would download."""
    needs: tuple[str, ...] = ()
    """Modules without which it is not tried."""


def random_tokens(folder: Path) -> None:
    """Write what nanoGPT's prepare.py makes of a text."""
    generator = torch.Generator().manual_seed(0)
    (folder / "data" / "noise").mkdir(parents=True)
    for part in ("train", "val"):
        tokens = torch.randint(64, (10_000,), generator=generator, dtype=torch.int16)
        (folder / "data" / "noise" / f"{part}.bin").write_bytes(tokens.numpy().tobytes())


EXAMPLES = "examples/distributed"
RASCHKAS = "LLMs-from-scratch/appendix-A/01_main-chapter-code"
SMALL_GPT = ("--n_layer=2", "--n_head=2", "--n_embd=32", "--block_size=16", "--batch_size=4", "--max_iters=4")
TENSORS = f"{EXAMPLES}/tensor_parallelism"
PROGRAMS = [
    *(
        Program(
            *(f"Accelerate, as installed: test_utils/scripts/{name}.py", "", f"accelerate.test_utils.scripts.{name}"),
            said=said,
            gpus=2,
            is_module=True,
            needs=("accelerate",),
        )
        for name, said in {
            "test_ops": r"Num processes: \d|testing .*",
            "test_ddp_comm_hook": r"Test DDP comm hook: \w+, comm wrapper: (?:no|fp16|bf16)",
            "test_merge_weights": r"Successfully merged .*",
        }.items()
    ),
    Program(
        *("PyTorch's examples: ddp/example.py", f"{EXAMPLES}/ddp", "example.py"),
        said=r"world_size = \d, rank = \d|training completed in rank \d",
        gpus=2,
    ),
    Program(
        *("PyTorch's examples: ddp-tutorial-series/multigpu_torchrun.py", f"{EXAMPLES}/ddp-tutorial-series"),
        *(
            "multigpu_torchrun.py",
            ("3", "1"),
            r"\[GPU\d\] Epoch \d \| Batchsize: \d+|Epoch \d \| Training",
        ),
        gpus=2,
    ),
    Program(
        *("PyTorch's examples: tensor_parallelism/tensor_parallel_example.py", TENSORS, "tensor_parallel_example.py"),
        said=r"Starting PyTorch TP example on rank \d|Tensor Parallel .*",
        gpus=2,
    ),
    Program(
        *("PyTorch's examples: minGPT-ddp/mingpt/main.py", f"{EXAMPLES}/minGPT-ddp/mingpt", "main.py"),
        (
            *("data_config.path=data/input.txt", "data_config.block_size=16", "data_config.truncate=0.002"),
            *("gpt_config.n_layer=2", "gpt_config.n_head=2", "gpt_config.n_embd=16"),
            *("trainer_config.max_epochs=1", "trainer_config.batch_size=64", "trainer_config.use_amp=False"),
            "trainer_config.data_loader_workers=0",
        ),
        r"Loss ",  # it sets no seed
        gpus=2,
        needs=("hydra", "fsspec", "boto3"),
    ),
    Program(
        *("PyTorch's examples: rpc/rnn/main.py", f"{EXAMPLES}/rpc/rnn", "main.py"),
        said=r"Training epoch \d",
        world_size=1,
    ),
    Program(
        *("nanoGPT: train.py", "nanoGPT", "train.py"),
        (
            *("--dtype=float32", "--compile=False", "--dataset=noise", *SMALL_GPT),
            *("--eval_iters=1", "--eval_interval=2", "--gradient_accumulation_steps=2"),
        ),
        r"loss [\d.]+",
        gpus=2,
        data=random_tokens,
    ),
    Program(
        *("Build a Large Language Model From Scratch: DDP-script-torchrun.py", RASCHKAS, "DDP-script-torchrun.py"),
        said=r"\[GPU\d\] [^\[\n]*",
        gpus=2,
    ),
    Program(
        *("Transformers: tests/trainer/distributed/scripts/worker_seed.py", "transformers/tests/trainer/distributed"),
        *("scripts/worker_seed.py", ("--output_dir=out", "--use_cpu", "--report_to=none"), r"'train_loss': '?[-\d.]+"),
    ),
]


def ran(program: Program, copy: Path, command: list[str]) -> tuple[int, str]:
    """Run a command where a program lies; return its exit code, and what it has printed."""
    own = pretended_gpu.environment(program.gpus) if program.gpus else {"PYTHONPATH": str(pretended_gpu.ROOT)}
    # torchrun's agent leaves a folder in TMPDIR.
    own |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "TMPDIR": str(copy.parent)}
    environment = {**os.environ, **own}
    done = subprocess.run(
        command, cwd=copy, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LONG_S
    )
    return done.returncode, done.stdout


def as_a_script(program: Program) -> list[str]:
    """Return the command by which its readme runs it."""
    name = ["-m", program.name] if program.is_module else [program.name]
    if program.world_size == 1:
        return [sys.executable, *name, *program.arguments]
    address = ["--nnodes=1", "--master-addr=127.0.0.1", f"--master-port={free_ports(1)[0]}"]
    ranks = f"--nproc-per-node={program.world_size}"
    return [sys.executable, "-m", "torch.distributed.run", *address, ranks, *name, *program.arguments]


def by_labkit(program: Program) -> list[str]:
    """Return the command that runs it by `labkit.run_script` or `run_module`."""
    fields = ("name", "arguments", "world_size", "is_module")
    return [sys.executable, "-c", LAUNCH, json.dumps({field: getattr(program, field) for field in fields})]


def why_not(program: Program, programs: Path) -> str:
    """Return why a program cannot be tried here; "" if it can."""
    if program.folder and not (programs / program.folder).is_dir():
        return f"no folder {program.folder}"
    missing = [name for name in program.needs if importlib.util.find_spec(name) is None]
    return f"needs {', '.join(missing)}" if missing else ""


def printed(program: Program, command: list[str], programs: Path, folder: Path) -> list[str]:
    """Run a copy of a program in a folder that is made for it; return what is compared of its output, sorted.

    Raises AssertionError, with the whole output, if it fails.
    """
    copy = folder / (Path(program.folder).name or "empty")
    if program.folder:
        shutil.copytree(programs / program.folder, copy, ignore=shutil.ignore_patterns(".git", "__pycache__"))
    else:
        copy.mkdir(parents=True)
    if program.data is not None:
        program.data(copy)
    code, output = ran(program, copy, command)
    assert code == 0, output
    return sorted(match.group().strip() for match in re.finditer(program.said, output))
