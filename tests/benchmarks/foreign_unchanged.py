"""Programs that nobody here wrote, with nothing of theirs changed: by torchrun or `python`, and by `labkit.run_script`.

Nothing is fetched: `--programs` is a folder with copies of the repositories, those that somebody has. What a program
would download is made where it looks for it. Programs that want several GPUs get pretended ones, which are the CPU
(`tests.pretended_gpu`). What they print, as far as it does not depend on the clock or on chance, must be the same both
ways, and both must end well. The table is printed, and written to `--out`.

    python -m tests.benchmarks.foreign_unchanged --programs programs
    python -m tests.benchmarks.foreign_unchanged --programs programs --only nanoGPT

The same as tests: `LABKIT_PROGRAMS=programs python -m pytest tests/whole/test_foreign.py`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from tests import pretended_gpu
from tests.benchmarks.launch import free_port

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
    """Makes in the copy, or beside it, what the program would download."""
    made: str = ""
    """What that is."""
    needs: tuple[str, ...] = ()
    """Modules without which it is not tried."""
    environment: Mapping[str, str] = {}
    """Variables that its own launcher would set."""


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


def mnist_beside(up: int, name: str) -> Callable[[Path], None]:
    """Return what writes MNIST's files, with noise in them, so many folders up."""

    def write(folder: Path) -> None:
        place = folder.parents[up - 1]
        noise_for_mnist(place / "made")
        shutil.move(place / "made" / "data", place / name)

    return write


def pictures_by_class(folder: Path) -> None:
    """Write small pictures of noise, in the folders that torchvision's `ImageFolder` and the program look for."""
    import numpy as np
    from PIL import Image

    generator = np.random.default_rng(0)
    for part, count in (("train", 8), ("val", 4)):
        for name in ("cat", "dog"):
            (folder / "pictures" / part / name).mkdir(parents=True)
            for number in range(count):
                pixels = generator.integers(256, size=(32, 32, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / "pictures" / part / name / f"{number}.png")


def student_part(folder: Path) -> None:
    """Fill in what the course has its students write: here with PyTorch's own DDP."""
    file = folder / "tests" / "adapters.py"
    text = file.read_text().replace("from __future__ import annotations\n", "", 1)
    own = "get_ddp = torch.nn.parallel.DistributedDataParallel\nddp_on_after_backward = lambda *_: None\n"
    file.write_text(f"from __future__ import annotations\n{text}\n\n{own}")


def sentences(folder: Path) -> None:
    """Make a tiny BERT, with its words, where the example names one, and libraries that make up pairs of sentences."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{n}" for n in range(40))]
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=32, **special)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.BertConfig(vocab_size=len(words), max_position_embeddings=32, **sizes)
    fast.save_pretrained(folder / "bert-base-cased")
    transformers.BertForSequenceClassification(config).save_pretrained(folder / "bert-base-cased")
    (folder / "datasets.py").write_text(DATASETS)
    (folder / "evaluate.py").write_text(EVALUATE)


DATASETS = '''
"""Of the library of this name, what the example calls."""

import random


class Rows(list):
    def map(self, function, batched, remove_columns):
        columns = {name: [row[name] for row in self] for name in self[0]}
        new = function(columns)
        kept = [{name: row[name] for name in row if name not in remove_columns} for row in self]
        return Rows({**row, **{name: new[name][n] for name in new}} for n, row in enumerate(kept))

    def rename_column(self, old, new):
        return Rows({new if name == old else name: value for name, value in row.items()} for row in self)


class Parts(dict):
    def map(self, *arguments, **options):
        return Parts({name: rows.map(*arguments, **options) for name, rows in self.items()})

    def rename_column(self, *names):
        return Parts({name: rows.rename_column(*names) for name, rows in self.items()})


def load_dataset(path, name):
    draw = random.Random(0)
    sentence = lambda: " ".join(f"w{draw.randrange(40)}" for _ in range(draw.randrange(3, 9)))
    row = lambda n: {"sentence1": sentence(), "sentence2": sentence(), "label": n % 2, "idx": n}
    return Parts(train=Rows(map(row, range(64))), validation=Rows(map(row, range(20))))
'''
EVALUATE = '''
"""Of the library of this name, what the example calls."""


class Accuracy:
    def __init__(self):
        self.right = self.all = 0

    def add_batch(self, predictions, references):
        self.right, self.all = self.right + (predictions == references).sum().item(), self.all + len(references)

    def compute(self):
        found, self.right, self.all = {"of": self.all, "accuracy": self.right / self.all}, 0, 0
        return found


def load(path, name):
    return Accuracy()
'''

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
        *("PyTorch's examples: ddp-tutorial-series/multigpu.py", f"{EXAMPLES}/ddp-tutorial-series"),
        *("multigpu.py", ("3", "1"), r"\[GPU\d\] Epoch \d \| Batchsize: \d+|Epoch \d \| Training"),
        gpus=2,
        world_size=1,
    ),
    Program(
        *("PyTorch's examples: tensor_parallelism/tensor_parallel_example.py", TENSORS, "tensor_parallel_example.py"),
        said=r"Starting PyTorch TP example on rank \d|Tensor Parallel .*",
        gpus=2,
    ),
    Program(
        *("PyTorch's examples: tensor_parallelism/sequence_parallel_example.py", TENSORS),
        "sequence_parallel_example.py",
        said=r"Starting PyTorch Sequence Parallel example on rank \d|Sequence Parallel .*",
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
        *("PyTorch's examples: imagenet/main.py", "examples/imagenet", "main.py"),
        (
            *("pictures", "--arch=resnet18", "--epochs=1", "--workers=0", "--batch-size=4", "--print-freq=1"),
            *("--dist-backend=gloo", "--dist-url=env://", "--seed=0"),
        ),
        r"Loss [\d.e+]+|Acc@1 +[\d.]+",
        data=pictures_by_class,
        made="24 pictures of noise",
        needs=("torchvision",),
    ),
    Program(
        *("PyTorch's examples: mnist_hogwild/main.py", "examples/mnist_hogwild", "main.py"),
        *(("--epochs=1", "--num-processes=2", "--test-batch-size=50"), r"Train Epoch: 1 "),
        world_size=1,
        data=mnist_beside(1, "data"),
        made="noise as MNIST",
        needs=("torchvision",),
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
        made="20,000 random tokens",
    ),
    Program(
        *("minGPT: projects/adder/adder.py", "minGPT", "projects/adder/adder.py"),
        (
            *("--model.model_type=None", "--model.n_layer=1", "--model.n_head=1", "--model.n_embd=12"),
            *("--trainer.max_iters=21", "--trainer.num_workers=0", "--trainer.device=cpu"),
        ),
        r"train loss [\d.]+|final score: .*",
        world_size=1,
        environment={"PYTHONPATH": "."},  # it is to be installed; see its README
    ),
    Program(
        *("Build a Large Language Model From Scratch: DDP-script-torchrun.py", RASCHKAS, "DDP-script-torchrun.py"),
        said=r"\[GPU\d\] [^\[\n]*",
        gpus=2,
    ),
    Program(
        *("CS336, assignment 2: tests/test_ddp.py", "assignment2-systems", "pytest"),
        *(("-q", "-p", "no:cacheprovider", "tests/test_ddp.py"), r"\d+ passed"),
        world_size=1,
        is_module=True,
        data=student_part,
        made="what its students write: PyTorch's DDP",
    ),
    Program(
        *("Accelerate: examples/nlp_example.py", "accelerate/examples", "nlp_example.py", ("--cpu",)),
        r"epoch \d: .*",
        data=sentences,
        made="a tiny BERT, and stand-ins of `datasets` and `evaluate` that make up sentences",
        environment={"ACCELERATE_USE_CPU": "true"},
    ),
    Program(
        *("Lightning: examples/fabric/image_classifier/train_fabric.py", "pytorch-lightning/examples/fabric"),
        *("image_classifier/train_fabric.py", ("--epochs=1", "--batch-size=32")),
        r"Train Epoch.*|Test set: .*",
        data=mnist_beside(2, "Datasets"),
        made="noise as MNIST",
        needs=("torchvision", "torchmetrics"),
        environment={"LT_ACCELERATOR": "cpu", "LT_STRATEGY": "ddp", "LT_DEVICES": "2", "LT_CLI_USED": "1"},
    ),
    Program(
        *("Transformers: tests/trainer/distributed/scripts/worker_seed.py", "transformers/tests/trainer/distributed"),
        *("scripts/worker_seed.py", ("--output_dir=out", "--use_cpu", "--report_to=none"), r"'train_loss': '?[-\d.]+"),
    ),
]


def ran(program: Program, copy: Path, command: list[str]) -> tuple[int, str]:
    """Run a command where a program lies; return its exit code, and what it has printed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **program.environment}
    if program.gpus:
        own = pretended_gpu.environment(program.gpus)
        environment |= own
    environment["TMPDIR"] = str(copy.parents[2])  # torchrun's agent leaves a folder there
    paths = [program.environment.get("PYTHONPATH", ""), environment.get("PYTHONPATH", ""), str(pretended_gpu.ROOT)]
    environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(filter(None, paths)))
    done = subprocess.run(
        command, cwd=copy, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LONG_S
    )
    return done.returncode, done.stdout


def as_a_script(program: Program) -> list[str]:
    """Return the command by which its readme runs it."""
    name = ["-m", program.name] if program.is_module else [program.name]
    if program.world_size == 1:
        return [sys.executable, *name, *program.arguments]
    address = ["--nnodes=1", "--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    ranks = f"--nproc-per-node={program.world_size}"
    return [sys.executable, "-m", "torch.distributed.run", *address, ranks, *name, *program.arguments]


def by_labkit(program: Program) -> list[str]:
    """Return the command that runs it by `labkit.run_script` or `run_module`."""
    fields = ("name", "arguments", "world_size", "is_module")
    return [
        sys.executable,
        "-X",
        "faulthandler",
        "-c",
        LAUNCH,
        json.dumps({field: getattr(program, field) for field in fields}),
    ]


def tried(program: Program, programs: Path, keep: Path) -> tuple[str, str]:
    """Run a program both ways; return what came of each: "runs", or what is different."""
    if program.folder and not (programs / program.folder).is_dir():
        return f"not tried: no folder {program.folder}", ""
    if missing := [name for name in program.needs if importlib.util.find_spec(name) is None]:
        return f"not tried: needs {', '.join(missing)}", ""
    said: list[str] = []
    found: list[list[str]] = []
    for way, command in (("script", as_a_script(program)), ("labkit", by_labkit(program))):
        with tempfile.TemporaryDirectory() as made:
            copy = Path(made) / "a" / "b" / (Path(program.folder).name or "empty")
            if program.folder:
                ignored = shutil.ignore_patterns(".git", "__pycache__", "*.png", "*.ipynb")
                shutil.copytree(programs / program.folder, copy, ignore=ignored)
            else:
                copy.mkdir(parents=True)
            if program.data is not None:
                program.data(copy)
            try:
                code, printed = ran(program, copy, command)
            except subprocess.TimeoutExpired:
                return said[0] if said else f"had not ended after {LONG_S} s", f"had not ended after {LONG_S} s"
        (keep / (re.sub(r"\W+", "-", f"{program.title} {way}") + ".txt")).write_text(printed)
        found.append(sorted(match.group().strip() for match in re.finditer(program.said, printed)))
        raised = re.findall(r"^(?:\[\w+ ?\d\]:?)?(\w[\w.]*(?:Error|Exception|Exit)\b.*)", printed, re.MULTILINE)
        said.append(f"ends with {code}: {raised[-1] if raised else printed[-200:]}"[:200] if code else "runs")
        if code and way == "script":
            return said[0], ""
    if not found[0]:
        said[0] = "says nothing that can be compared"
    elif said[1] == "runs" and found[0] != found[1]:
        said[1] = "runs, but prints something else"
    return said[0], said[1]


def row(program: Program, as_script: str, by_labkit: str) -> str:
    """Return a program's row."""
    where = f"{program.gpus} pretended GPUs" if program.gpus else "CPU"
    starts = "by torchrun" if program.world_size > 1 else "starts its processes itself"
    cells = [program.title, f"{where}, {starts}", program.made or "its own", as_script, by_labkit]
    return f"| {' | '.join(cells)} |".replace("\n", " ")


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


def main() -> None:
    """Try the programs that are there, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=Path, required=True, help="the folder with copies of the repositories")
    parser.add_argument("--only", nargs="*", default=[], help="words of titles; all programs by default")
    parser.add_argument("--out", type=Path, default=Path("build") / "foreign_unchanged.md")
    arguments = parser.parse_args()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    chosen = [each for each in PROGRAMS if not arguments.only or any(word in each.title for word in arguments.only)]
    lines = ["| program | where | data | as a script | by labkit |", "|---|---|---|---|---|"]
    for program in chosen:
        lines.append(row(program, *tried(program, arguments.programs, arguments.out.parent)))
        print(lines[-1], flush=True)
        arguments.out.write_text("\n".join(lines) + f"\n\n{commits(chosen, arguments.programs)}")


if __name__ == "__main__":
    main()
