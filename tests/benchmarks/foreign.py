"""Programs that nobody here wrote, as a script and as a cell: which run, what had to be changed, and why.

Nothing is fetched: `--programs` is a folder with copies of the repositories that `PROGRAMS` names, those that somebody
has. Of each the files are copied, changed as its row says (there is no GPU here, and no data), and run as a script and
in a notebook's cells, as `tests/support/twins.py` does it. What they print, as far as it does not depend on the clock,
must be the same, and all must end well. The table is printed, and written to `--out`.

    git clone https://github.com/karpathy/nanoGPT programs/nanoGPT
    git clone https://github.com/pytorch/examples programs/examples
    python -m tests.benchmarks.foreign --programs programs
    python -m tests.benchmarks.foreign --programs programs --only nanoGPT --ways cell reserved
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from tests.support.twins import CELLS, SCRIPTS, Outcome, Twin, outcome

LONG_S = 900


class Change(NamedTuple):
    """One text of a file that another takes the place of."""

    file: str
    old: str
    new: str
    why: str


class Program(NamedTuple):
    """One public program."""

    title: str
    folder: str
    """Within the programs; what is copied."""
    cell: str
    """Source that defines `main(worker)`, or `main(rank)` where the program has `mp.spawn` start its ranks."""
    said: str
    """A pattern: what of its output is compared."""
    changes: tuple[Change, ...] = ()
    data: Callable[[Path], None] | None = None
    """Makes in the copy what the program would download."""
    needs: tuple[str, ...] = ()
    """Modules without which it is not tried."""
    takes: str = "worker"
    script: str = "torchrun"
    world_size: int = 2
    repeats: bool = True
    """Whether reserved ranks do it twice; not where the second would go on from what the first has saved."""


def whole(file: str, *arguments: str, folder: str = ".") -> str:
    """Return a cell that runs a file as it is, with its command line."""
    return f"""
import os
import runpy
import sys

sys.argv = {[file, *arguments]!r}


def main(worker):
    os.chdir({folder!r})
    sys.path.insert(0, os.getcwd())  # where `python {file}` looks first
    runpy.run_path({file!r}, run_name="__main__")
"""


# What is changed

NO_GPU = "no GPU here"
NO_TIME = "a moment must do"


def without_gpus(file: str, old: str = "if not verify_min_gpu_count(min_gpus=_min_gpu_count):") -> Change:
    """Return the change that keeps an example from refusing to begin."""
    return Change(file, old, "if False:", "it ends at once where there are fewer than two GPUs")


def random_tokens(folder: Path) -> None:
    """Write what nanoGPT's prepare.py makes of a text."""
    generator = torch.Generator().manual_seed(0)
    (folder / "data" / "noise").mkdir(parents=True)
    for part in ("train", "val"):
        tokens = torch.randint(64, (10_000,), generator=generator, dtype=torch.int16)
        (folder / "data" / "noise" / f"{part}.bin").write_bytes(tokens.numpy().tobytes())


def noise_for_mnist(folder: Path) -> None:
    """Write files of MNIST's form, with noise in them, where torchvision would put what it downloads."""
    raw = folder / "data" / "MNIST" / "raw"
    raw.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    for part, count in (("train", 640), ("t10k", 100)):
        images = torch.randint(256, (count, 28, 28), generator=generator, dtype=torch.uint8)
        labels = torch.randint(10, (count,), generator=generator, dtype=torch.uint8)
        for name, values in (("images-idx3", images), ("labels-idx1", labels)):
            head = b"".join(n.to_bytes(4, "big") for n in (0x800 + values.dim(), *values.shape))
            (raw / f"{part}-{name}-ubyte").write_bytes(head + values.numpy().tobytes())


def some_text(folder: Path) -> None:
    """Write a text, of words that are drawn."""
    words = ("first", "citizen", "before", "we", "proceed", "any", "further", "hear", "me", "speak", "all", "resolved")
    drawn = torch.randint(len(words), (400,), generator=torch.Generator().manual_seed(0))
    (folder / "input.txt").write_text(" ".join(words[index] for index in drawn) + "\n")


def some_pictures(folder: Path) -> None:
    """Write small pictures of noise, in a folder for each part and class."""
    import numpy as np
    from PIL import Image

    generator = np.random.default_rng(0)
    for part, count in (("train", 8), ("validation", 4)):
        for name in ("cat", "dog"):
            (folder / "pictures" / part / name).mkdir(parents=True)
            for number in range(count):
                pixels = generator.integers(256, size=(32, 32, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / "pictures" / part / name / f"{number}.png")


def no_gpu_in(file: str) -> tuple[Change, ...]:
    """Return the changes for the scripts of that book's appendix A."""
    return (
        Change(file, 'backend="nccl"', 'backend="gloo"', NO_GPU),
        Change(file, "    torch.cuda.set_device(rank)\n", "", NO_GPU),
        Change(file, "model.to(rank)", "model", NO_GPU),
        Change(file, "features.to(rank), labels.to(rank)", "features, labels", NO_GPU),
        Change(file, "DDP(model, device_ids=[rank])", "DDP(model)", NO_GPU),
        Change(file, "device=rank)", 'device="cpu")', NO_GPU),
    )


EXAMPLES = "examples/distributed"
RASCHKAS = "LLMs-from-scratch/appendix-A/01_main-chapter-code"
PROGRAMS = [
    Program(
        "nanoGPT: train.py",
        "nanoGPT",
        whole(
            "train.py",
            *("--backend=gloo", "--device=cpu", "--dtype=float32", "--compile=False", "--dataset=noise"),
            *("--n_layer=2", "--n_head=2", "--n_embd=32", "--block_size=16", "--batch_size=4", "--max_iters=4"),
            *("--eval_iters=1", "--eval_interval=2", "--gradient_accumulation_steps=2"),
        ),
        r"loss [\d.]+",
        (
            Change("train.py", "device = f'cuda:{ddp_local_rank}'", "device = 'cpu'", NO_GPU),
            Change("train.py", "    torch.cuda.set_device(device)\n", "", NO_GPU),
            Change("train.py", "DDP(model, device_ids=[ddp_local_rank])", "DDP(model)", NO_GPU),
        ),
        random_tokens,
    ),
    Program(
        "PyTorch's examples: ddp/example.py",
        f"{EXAMPLES}/ddp",
        whole("example.py"),
        r"world_size = \d, rank = \d|training completed in rank \d",
        (
            without_gpus("example.py"),
            Change("example.py", "acc = torch.accelerator.current_accelerator()", "acc = torch.device('cpu')", NO_GPU),
            Change("example.py", "torch.accelerator.set_device_index(rank)", "pass", NO_GPU),
            Change("example.py", "ToyModel().to(rank)", "ToyModel()", NO_GPU),
            Change("example.py", "DDP(model, device_ids=[rank])", "DDP(model)", NO_GPU),
            Change("example.py", "torch.randn(20, 5).to(rank)", "torch.randn(20, 5)", NO_GPU),
        ),
    ),
    Program(
        "PyTorch's examples: ddp-tutorial-series/multigpu_torchrun.py",
        f"{EXAMPLES}/ddp-tutorial-series",
        whole("multigpu_torchrun.py", "3", "1"),
        r"\[GPU\d\] Epoch .*|Epoch \d .*",
        (
            Change("multigpu_torchrun.py", '    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))\n', "", NO_GPU),
            Change("multigpu_torchrun.py", 'backend="nccl"', 'backend="gloo"', NO_GPU),
            Change("multigpu_torchrun.py", "model.to(self.gpu_id)", "model", NO_GPU),
            Change("multigpu_torchrun.py", "DDP(self.model, device_ids=[self.gpu_id])", "DDP(self.model)", NO_GPU),
            Change("multigpu_torchrun.py", "source.to(self.gpu_id)", "source", NO_GPU),
            Change("multigpu_torchrun.py", "targets.to(self.gpu_id)", "targets", NO_GPU),
            Change("multigpu_torchrun.py", 'f"cuda:{self.gpu_id}"', '"cpu"', NO_GPU),
        ),
        repeats=False,
    ),
    Program(
        "PyTorch's examples: ddp-tutorial-series/multigpu.py, its functions in a cell",
        f"{EXAMPLES}/ddp-tutorial-series",
        """
import multigpu


def main(rank):
    multigpu.main(rank, 2, 1, 3, 32)
""",
        r"\[GPU\d\] Epoch .*|Epoch \d .*",
        (
            Change("multigpu.py", "    torch.cuda.set_device(rank)\n", "", NO_GPU),
            Change("multigpu.py", 'backend="nccl"', 'backend="gloo"', NO_GPU),
            Change("multigpu.py", "model.to(gpu_id)", "model", NO_GPU),
            Change("multigpu.py", "DDP(model, device_ids=[gpu_id])", "DDP(model)", NO_GPU),
            Change("multigpu.py", "source.to(self.gpu_id)", "source", NO_GPU),
            Change("multigpu.py", "targets.to(self.gpu_id)", "targets", NO_GPU),
        ),
        takes="rank",
        script="spawn",
    ),
    Program(
        "PyTorch's examples: FSDP2/example.py",
        f"{EXAMPLES}/FSDP2",
        whole("example.py", "--explicit-prefetching"),
        r"Running on device .*|FSDP\w+\(",
        (
            without_gpus("example.py"),
            Change("example.py", "(backend=backend, device_id=device)", "(backend=backend)", NO_GPU),
        ),
        repeats=False,
    ),
    Program(
        "PyTorch's examples: tensor_parallelism/tensor_parallel_example.py",
        f"{EXAMPLES}/tensor_parallelism",
        whole("tensor_parallel_example.py"),
        r"Starting PyTorch TP example on rank \d|Tensor Parallel .*",
        (
            without_gpus("tensor_parallel_example.py"),
            Change("tensor_parallel_example.py", "torch.accelerator.current_accelerator().type", "'cpu'", NO_GPU),
        ),
    ),
    Program(
        "PyTorch's examples: tensor_parallelism/sequence_parallel_example.py",
        f"{EXAMPLES}/tensor_parallelism",
        whole("sequence_parallel_example.py"),
        r"Starting PyTorch Sequence Parallel example on rank \d|Sequence Parallel .*",
        (
            without_gpus("sequence_parallel_example.py"),
            Change("sequence_parallel_example.py", "torch.accelerator.current_accelerator().type", "'cpu'", NO_GPU),
        ),
    ),
    Program(
        "PyTorch's examples: tensor_parallelism/fsdp_tp_example.py",
        f"{EXAMPLES}/tensor_parallelism",
        whole("fsdp_tp_example.py"),
        r"Starting PyTorch 2D .*|2D .*",
        (
            without_gpus("fsdp_tp_example.py"),
            Change("fsdp_tp_example.py", "torch.accelerator.current_accelerator().type", "'cpu'", NO_GPU),
            Change("fsdp_tp_example.py", "vocab_size=32000", "vocab_size=64", NO_TIME),
            Change("fsdp_tp_example.py", "torch.randint(32000, (8, 256)", "torch.randint(64, (8, 16)", NO_TIME),
        ),
        world_size=4,
    ),
    Program(
        "PyTorch's examples: rpc/rnn/main.py, its functions in a cell",
        f"{EXAMPLES}/rpc/rnn",
        """
import main as program


def main(rank):
    program.run_worker(rank, 2)
""",
        r"Training epoch \d",
        takes="rank",
        script="spawn",
    ),
    Program(
        "PyTorch's examples: rpc/batch/parameter_server.py, its functions in a cell",
        f"{EXAMPLES}/rpc/batch",
        """
import parameter_server


def main(rank):
    parameter_server.run(rank, 2)
""",
        r"trainer\d [a-z ]+|PS .*",
        (
            Change("parameter_server.py", "yield inputs.cuda(), labels.cuda()", "yield inputs, labels", NO_GPU),
            Change("parameter_server.py", "get_model().cuda()", "get_model()", NO_GPU),
            Change("parameter_server.py", "            ).cuda()", "            )", NO_GPU),
            Change("parameter_server.py", "batch_update_size = 5", "batch_update_size = 1", "one trainer here"),
            Change("parameter_server.py", "resnet50", "resnet18", NO_TIME),
            Change("parameter_server.py", "num_batches = 6", "num_batches = 2", NO_TIME),
        ),
        needs=("torchvision",),
        takes="rank",
        script="spawn",
    ),
    Program(
        "PyTorch's examples: rpc/ddp_rpc/main.py, its functions in a cell",
        f"{EXAMPLES}/rpc/ddp_rpc",
        """
import torch.distributed as dist

import main as program


def main(rank):
    if dist.is_initialized():
        dist.destroy_process_group()  # that of all four ranks: two of them make their own
    program.run_worker(rank, 4)
""",
        r"Training done for epoch \d",
        (
            Change("main.py", ".to(rank)", "", NO_GPU),
            Change("main.py", ".to(self.rank)", "", NO_GPU),
            Change("main.py", "acc = torch.accelerator.current_accelerator()", "acc = 'cpu'", NO_GPU),
            Change("main.py", "torch.accelerator.device_index(rank)", "pass", NO_GPU),
            Change("main.py", "range(100)", "range(3)", NO_TIME),
        ),
        takes="rank",
        script="spawn",
        world_size=4,
        repeats=False,
    ),
    Program(
        "PyTorch's examples: imagenet/main.py",
        "examples/imagenet",
        """
import os
import sys

import main as program

sys.argv = ["main.py", "--dummy", "--arch=resnet18", "--epochs=1", "--workers=0", "--batch-size=4",
            "--dist-backend=gloo", "--dist-url=env://", "--world-size=-1", "--rank=-1", "--print-freq=1", "--seed=0"]


def main(worker):
    program.main()
""",
        r"Loss [\d.e+]+|Acc@1 +[\d.]+",
        (
            Change("main.py", "FakeData(1281167, (3, 224, 224)", "FakeData(16, (3, 64, 64)", NO_TIME),
            Change("main.py", "FakeData(50000, (3, 224, 224)", "FakeData(8, (3, 64, 64)", NO_TIME),
        ),
        needs=("torchvision",),
    ),
    Program(
        "PyTorch's examples: mnist_hogwild/main.py",
        "examples/mnist_hogwild",
        whole("main.py", "--epochs=1", "--num-processes=2", "--test-batch-size=50"),
        r"Train Epoch: 1",
        (Change("main.py", "'../data'", "'data'", "it would write beside its folder"),),
        noise_for_mnist,
        needs=("torchvision",),
        script="spawn",
        world_size=1,
    ),
    Program(
        "PyTorch's examples: minGPT-ddp/mingpt/main.py",
        f"{EXAMPLES}/minGPT-ddp/mingpt",
        whole(
            "main.py",
            *("data_config.path=input.txt", "data_config.block_size=16", "data_config.truncate=1.0"),
            *("gpt_config.n_layer=2", "gpt_config.n_head=2", "gpt_config.n_embd=16"),
            *("trainer_config.max_epochs=1", "trainer_config.batch_size=8", "trainer_config.use_amp=False"),
            "trainer_config.data_loader_workers=0",
        ),
        r"Loss [\d.]+",
        (
            without_gpus("main.py"),
            Change("main.py", 'torch.device(f"{acc}:{rank}")', 'torch.device("cpu")', NO_GPU),
            Change("main.py", "    torch.accelerator.set_device_index(rank)\n", "", NO_GPU),
            Change("trainer.py", 'torch.device(f"{self.acc}:{self.local_rank}")', 'torch.device("cpu")', NO_GPU),
            Change("trainer.py", "model.to(self.local_rank)", "model", NO_GPU),
            Change("trainer.py", "DDP(self.model, device_ids=[self.local_rank])", "DDP(self.model)", NO_GPU),
            Change("trainer.py", "source.to(self.local_rank)", "source", NO_GPU),
            Change("trainer.py", "targets.to(self.local_rank)", "targets", NO_GPU),
        ),
        some_text,
        needs=("hydra", "fsspec", "boto3"),
        repeats=False,
    ),
    Program(
        "minGPT: projects/adder/adder.py",
        "minGPT",
        whole(
            "projects/adder/adder.py",
            *("--model.model_type=None", "--model.n_layer=1", "--model.n_head=1", "--model.n_embd=12"),
            *("--trainer.max_iters=21", "--trainer.num_workers=0", "--trainer.device=cpu"),
        ),
        r"train loss [\d.]+|final score: .*",
        (Change("projects/adder/adder.py", "if trainer.iter_num % 500 == 0:", "if trainer.iter_num == 20:", NO_TIME),),
        world_size=1,
    ),
    Program(
        "Build a Large Language Model From Scratch: DDP-script.py, its functions in a cell",
        RASCHKAS,
        """
import runpy

program = runpy.run_path("DDP-script.py")


def main(rank):
    program["main"](rank, 2, 3)
""",
        r"\[GPU\d\] .*",
        no_gpu_in("DDP-script.py"),
        takes="rank",
        script="spawn",
    ),
    Program(
        "Build a Large Language Model From Scratch: DDP-script-torchrun.py",
        RASCHKAS,
        whole("DDP-script-torchrun.py"),
        r"\[GPU\d\] .*",
        no_gpu_in("DDP-script-torchrun.py"),
    ),
    Program(
        "timm: train.py",
        "pytorch-image-models",
        whole(
            "train.py",
            *("--data-dir=pictures", "--model=resnet10t", "--device=cpu"),
            *("--epochs=1", "--batch-size=4", "--workers=0", "--img-size=32", "--num-classes=2", "--log-interval=1"),
            *("--warmup-epochs=0", "--cooldown-epochs=0", "--no-prefetcher", "--output=output", "--experiment=one"),
        ),
        r"Loss: +[\d.]+",
        (),
        some_pictures,
        needs=("torchvision", "yaml", "huggingface_hub", "safetensors"),
        repeats=False,
    ),
    Program(
        "DLRM: dlrm_s_pytorch.py",
        "dlrm",
        whole(
            "dlrm_s_pytorch.py",
            *("--dist-backend=gloo", "--mini-batch-size=8", "--data-size=64", "--print-freq=2", "--nepochs=1"),
            *("--arch-embedding-size=80-40", "--arch-sparse-feature-size=2", "--arch-mlp-bot=4-3-2"),
            *("--arch-mlp-top=5-4-2-1", "--numpy-rand-seed=1"),
        ),
        r"loss [\d.]+",
        (Change("dlrm_s_pytorch.py", "use_cuda=use_gpu, ", "", "this PyTorch has no such argument any more"),),
        needs=("sklearn", "tensorboard"),
    ),
]


class Row(NamedTuple):
    """What came of one program."""

    title: str
    changed: str
    said: dict[str, str]
    """By way: "runs", or what is different."""
    why_not: str = ""
    """Why it was not tried."""


def copy_of(program: Program, programs: Path, folder: Path) -> str:
    """Make the changed copy; return why that cannot be, or ""."""
    there = programs / program.folder
    if not there.is_dir():
        return f"no folder {program.folder}"
    if missing := [name for name in program.needs if importlib.util.find_spec(name) is None]:
        return f"needs {', '.join(missing)}"
    shutil.copytree(there, folder, ignore=shutil.ignore_patterns(".git", "__pycache__", "*.png", "*.ipynb"))
    for change in program.changes:
        file = folder / change.file
        text = file.read_text() if file.exists() else ""
        if change.old not in text:
            return f"{change.file} has no {change.old.strip()!r} (any more): its row is to be written anew"
        file.write_text(text.replace(change.old, change.new))
    if program.data is not None:
        program.data(folder)
    return ""


def changed(program: Program) -> str:
    """Return what was changed, and why, in a line."""
    reasons: dict[str, int] = {}
    for change in program.changes:
        reasons[change.why] = reasons.get(change.why, 0) + 1
    said = [f"{count} place{'s' if count > 1 else ''}: {why}" for why, count in reasons.items()]
    if program.data is not None:
        said.append("its data are made here")
    return "; ".join(said) or "nothing"


def judged(program: Program, script: Outcome, got: Outcome) -> str:
    """Return whether a way did what the script did."""
    if got.status != "finished":
        raised = re.search(r"\w+(Error|Exception|Exit): .*", "\n".join([*sum(got.output, []), got.said]))
        return f"{got.status}: {raised[0] if raised else got.said.strip()[:200]}"[:200]
    found, expected = (
        [sorted(match for line in lines for match in re.findall(program.said, line)) for lines in each.output]
        for each in (got, script)
    )
    if not any(expected):
        return "says nothing that can be compared"
    return "runs" if found == expected else "runs, but prints something else"


def try_program(program: Program, programs: Path, ways: list[str], keep: Path | None) -> Row:
    """Run one program each way."""
    with tempfile.TemporaryDirectory() as made:
        copy = Path(made) / "copy"
        if why_not := copy_of(program, programs, copy):
            return Row(program.title, changed(program), {}, why_not)
        twin = Twin(
            program.title,
            program.cell,
            joins=False,
            repeats=program.repeats,
            world_size=program.world_size,
            takes=program.takes,
            launched="lambda worker: main(worker.rank)" if program.takes == "rank" else "main",
            scripts=(program.script,),
        )
        outcomes: dict[str, Outcome] = {}
        said: dict[str, str] = {}
        for way in (program.script, *ways):
            try:
                outcomes[way] = outcome(twin, way, Path(made) / way, given=copy, long_s=LONG_S)
            except (subprocess.TimeoutExpired, AssertionError) as error:
                said[way] = f"{type(error).__name__}: {error}"[:200]
                continue
            if keep is not None:
                name = re.sub(r"\W+", "-", f"{program.title} {way}")
                (keep / f"{name}.txt").write_text(f"{outcomes[way]}\n\n{outcomes[way].said}")
            script = outcomes.get(program.script)
            said[way] = judged(program, script, outcomes[way]) if script else "its script did not end"
            if way == program.script and said[way] != "runs":
                break  # there is nothing to compare with
        return Row(program.title, changed(program), said)


def commits(chosen: list[Program], programs: Path) -> str:
    """Return which copies were tried, as far as their folders are clones, when, and with what."""
    found = {}
    for name in sorted({program.folder.partition("/")[0] for program in chosen}):
        if (programs / name / ".git").exists():
            command = ["git", "-C", str(programs / name), "log", "-1", "--format=%h of %as"]
            found[name] = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    said = [f"{name} at {commit}" for name, commit in found.items() if commit]
    said += [f"torch {torch.__version__.partition('+')[0]}", f"Python {sys.version.split()[0]}", "two ranks, gloo"]
    return f"{time.strftime('%Y-%m-%d')}: {', '.join(said)}.\n"


def table(rows: list[Row], ways: list[str]) -> str:
    """Return the rows as Markdown."""
    head = ["program", "what was changed, and why", "as a script", *ways]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for row in rows:
        if row.why_not:
            cells = [f"not tried: {row.why_not}", *[""] * len(ways)]
        else:
            script = next((said for way, said in row.said.items() if way in SCRIPTS), "")
            cells = [script, *(row.said.get(way, "") for way in ways)]
        lines.append(f"| {' | '.join([row.title, row.changed, *cells])} |".replace("\n", " "))
    return "\n".join(lines) + "\n"


def main() -> None:
    """Try the programs that are there, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=Path, required=True, help="the folder with copies of the repositories")
    parser.add_argument("--only", nargs="*", default=[], help="words of titles; all programs by default")
    parser.add_argument("--ways", nargs="*", default=list(CELLS), choices=CELLS, help="how cells are launched")
    parser.add_argument("--out", type=Path, default=Path("build") / "foreign.md")
    arguments = parser.parse_args()
    os.environ.update(LABKIT_TWIN_S=str(LONG_S), OMP_NUM_THREADS="1")  # as torchrun has it, so that digits are equal
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    chosen = [each for each in PROGRAMS if not arguments.only or any(word in each.title for word in arguments.only)]
    rows = []
    for program in chosen:
        rows.append(try_program(program, arguments.programs, arguments.ways, arguments.out.parent))
        print(rows[-1], file=sys.stderr, flush=True)
        arguments.out.write_text(f"{table(rows, arguments.ways)}\n{commits(chosen, arguments.programs)}")
    print(arguments.out.read_text(), end="")


if __name__ == "__main__":
    main()
