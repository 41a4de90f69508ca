"""labkit.export: what is written, what is refused, and that the folder trains elsewhere as the notebook did."""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

import labkit
from labkit.exporting import describe, imports, rehearsal, script, statements
from labkit.protocol.job import Cell
from labkit.system import host
from tests.conftest import LONG_S, wait_until
from tests.support import cluster
from tests.ui.test_kernel import Notebook as Kernel

HEAD = """
import torch
import torch.distributed as dist
from torch import nn
"""
TRAIN = """
def train(worker):
    return {}
"""


class Notebook:
    """Cells without a kernel: compiled and kept as IPython does."""

    def __init__(self):
        self.names = {"__name__": "__main__"}
        self.cells = {}

    def run(self, text):
        number = len(self.cells) + 1
        file = f"/tmp/ipykernel_1/{number}.py"
        text = textwrap.dedent(text).strip() + "\n"
        self.cells[file] = Cell(f"Cell In[{number}]", text)
        exec(compile(text, file, "exec", dont_inherit=True), self.names)


packages = functools.cache(importlib.metadata.packages_distributions)
"""Looked up once for all tests: it reads a file of every package that is installed."""


@pytest.fixture
def notebook(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "packages_distributions", packages)
    notebook = Notebook()
    monkeypatch.setattr(statements.kernel, "cells", lambda: notebook.cells)
    monkeypatch.setattr(rehearsal, "in_a_fresh_process", in_this_process)
    return notebook


def in_this_process(request, environment):
    """What a job defines, without a process of its own, which takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        return describe.of_a_script(**request)


@pytest.fixture
def exported(notebook, tmp_path):
    """Runs cells, exports the last one's `train`, and gives train.py's text."""

    def export(*cells, name="train", **arguments):
        for cell in cells:
            notebook.run(cell)
        folder = labkit.export(notebook.names[name], tmp_path / "job", **arguments)
        return (folder / "train.py").read_text()

    return export


def split(cells):
    """Cells from one text, with `# ---` between them."""
    return [cell for cell in textwrap.dedent(cells).split("# ---\n") if cell.strip()]


def body(text):
    """The script between its docstring and its last lines."""
    return text.split('"""\n\n', 1)[1].split('\n\n\nif __name__ == "__main__":')[0]


# What is written


WRITTEN = {
    "nothing but the function": ("", "worker.rank", ""),
    "imports as the notebook has them, those that are used": (
        """
        import os, sys, json as j
        import torch
        import torch.nn.functional as F
        from torch import nn, optim
        from torch.nn.parallel import DistributedDataParallel as DDP
        from math import pi
        """,
        "F, nn, DDP, pi, j, torch.zeros(1)",
        """
        import json as j
        from math import pi

        import torch
        import torch.nn.functional as F
        from torch import nn
        from torch.nn.parallel import DistributedDataParallel as DDP
        """,
    ),
    "a submodule that `import a` alone would not load": (
        "import concurrent.futures, xml.dom",
        "concurrent.futures.Future",
        "import concurrent\nimport concurrent.futures",
    ),
    "constants": (
        """
        import math, torch
        from pathlib import Path
        a, b, c, d, e = 1, -2.5, "it's", None, [(1,), {'k': {2}}, (), True, 1e-7]
        f, g, h, i = float('inf'), torch.float16, Path('x') / 'y', range(3)
        """,
        "a, b, c, d, e, f, g, h, i",
        """
        from pathlib import Path

        import torch

        a = 1
        b = -2.5
        c = "it's"
        d = None
        e = [(1,), {"k": {2}}, (), True, 1e-07]
        f = float("inf")
        g = torch.float16
        h = Path("x/y")
        i = range(0, 3)
        """,
    ),
    "helpers in the notebook's order, with their comments and decorators": (
        """
        import functools
        # ---
        # Twice.
        @functools.cache
        def twice(x):
            return 2 * x


        def unused():
            pass
        # ---
        def thrice(x):
            return x + twice(x)
        """,
        "thrice(1)",
        """
        import functools


        # Twice.
        @functools.cache
        def twice(x):
            return 2 * x


        def thrice(x):
            return x + twice(x)
        """,
    ),
    "a class, its base, and what stands in its body": (
        """
        from torch import nn
        WIDTH = 3
        class Base(nn.Module):
            pass
        # ---
        class Net(Base):
            width = [WIDTH for _ in range(2)]
            def forward(self, x):
                return super().forward(x)
        """,
        "Net()",
        """
        from torch import nn

        WIDTH = 3


        class Base(nn.Module):
            pass


        class Net(Base):
            width = [WIDTH for _ in range(2)]
            def forward(self, x):
                return super().forward(x)
        """,
    ),
    "classes without methods": (
        """
        from dataclasses import dataclass
        from typing import NamedTuple
        @dataclass
        class A:
            x: int = 1
        # ---
        class B(NamedTuple):
            a: A
        """,
        "B(A())",
        """
        from dataclasses import dataclass
        from typing import NamedTuple


        @dataclass
        class A:
            x: int = 1


        class B(NamedTuple):
            a: A
        """,
    ),
    "the newest of two definitions": (
        """
        def f():
            return 1
        class C:
            x = 1
        # ---
        def f():
            return 2
        class C:
            x = 2
        """,
        "f(), C",
        """
        def f():
            return 2


        class C:
            x = 2
        """,
    ),
    "a collection of functions, after them": (
        """
        from torch import nn
        def f():
            pass
        WAYS = {'f': f, 'l': nn.Linear, 'i': int}
        """,
        "WAYS",
        """
        from torch import nn


        def f():
            pass


        WAYS = {"f": f, "l": nn.Linear, "i": int}
        """,
    ),
    "a function under a second name, and a lambda that has one": (
        """
        square = lambda x: x * x
        # ---
        def f(x):
            return square(x)
        g = f
        """,
        "g(2)",
        """
        square = lambda x: x * x


        def f(x):
            return square(x)


        g = f
        """,
    ),
    "partial, where it is a constant": (
        """
        import functools, torch
        make = functools.partial(torch.optim.SGD, lr=0.1)
        """,
        "make",
        """
        import functools

        from torch.optim.sgd import SGD

        make = functools.partial(SGD, lr=0.1)
        """,
    ),
    "what a nested function uses": (
        "A, B = 1, 2",
        "(lambda n: [A + k for k in range(n)]), sum(B for _ in range(3))",
        "A = 1\nB = 2",
    ),
    "what a default and an annotation need": (
        """
        A, B = 1, int
        # ---
        def helper(n: B = A):
            pass
        """,
        "helper()",
        """
        A = 1
        B = int


        def helper(n: B = A):
            pass
        """,
    ),
    "annotations that are never evaluated": (
        """
        from __future__ import annotations
        def helper(n: Nothing) -> NotThere:
            pass
        """,
        "helper(1)",
        """
        from __future__ import annotations


        def helper(n: Nothing) -> NotThere:
            pass
        """,
    ),
    "a global that the function itself makes": (
        """
        def count():
            global counted
            counted = 1
            return counted
        """,
        "count()",
        """
        def count():
            global counted
            counted = 1
            return counted
        """,
    ),
}


@pytest.mark.parametrize("what", WRITTEN)
def test_is_written(what, exported):
    cells, returned, expected = WRITTEN[what]
    text = exported(*split(cells), TRAIN.format(returned))
    compile(text, "train.py", "exec")
    expected = textwrap.dedent(expected).strip()
    assert body(text).lstrip() == f"{expected}\n\n\n{TRAIN.format(returned).strip()}".lstrip()


def test_the_last_line_calls_the_function_with_the_notebooks_arguments(exported):
    cell = "def train(worker, lr, name='a', sizes=(1,), **more):\n    pass"
    text = exported(cell, lr=1e-3, sizes=(8, 9), extra={"k": None}, seed=7)
    assert text.endswith(
        '    labkit.exporting.script.main(train, {"lr": 0.001, "sizes": (8, 9), "extra": {"k": None}}, seed=7)\n'
    )


def test_a_partials_arguments_become_the_scripts(notebook, tmp_path):
    notebook.run("def train(worker, seed, lr=1):\n    return seed, lr")
    bound = functools.partial(notebook.names["train"], seed=3, lr=2)
    folder = labkit.export(bound, tmp_path / "job", lr=4)
    assert '{"seed": 3, "lr": 4}, seed=0)' in (folder / "train.py").read_text()


def test_the_readers_own_module_is_copied_with_what_it_imports(exported, package_folder, tmp_path):
    (package_folder / "mine_a.py").write_text("import mine_b\n\ndef f():\n    return mine_b.X\n")
    (package_folder / "mine_b.py").write_text("import psutil\nX = 1\n")
    imports.local_file.cache_clear()
    text = exported("import mine_a\nfrom mine_b import X", TRAIN.format("mine_a.f(), X"))
    assert "import mine_a\nfrom mine_b import X\n" in text
    for name in ("mine_a.py", "mine_b.py"):
        assert (tmp_path / "job" / name).read_bytes() == (tmp_path / name).read_bytes()


PACKAGE = {
    "__init__.py": """
        from my_package.settings import LR

        def __getattr__(name):  # a name that comes when it is first asked for
            from my_package.inner.later import step
            return step
    """,
    "settings.py": "LR = 0.1",
    "unused.py": "raise RuntimeError",
    "table.csv": "api_key = 'AKIAABCDEFGHIJKLMNOP'",
    "inner/__init__.py": "",
    "inner/later.py": "import psutil\nfrom my_package import settings\n\ndef step():\n    return settings.LR",
    "inner/data/weights.bin": "0",
    "other/__init__.py": "",
    "other/huge.bin": "0",
    "__pycache__/settings.cpython-399.pyc": "",
}


def test_of_the_readers_own_package_the_modules_that_are_used_are_copied_with_their_data(
    exported, package_folder, tmp_path, monkeypatch
):
    for name, text in PACKAGE.items():
        (package_folder / "my_package" / name).parent.mkdir(parents=True, exist_ok=True)
        (package_folder / "my_package" / name).write_text(textwrap.dedent(text))
    imports.local_file.cache_clear()
    with pytest.warns(UserWarning, match="my_package/table.csv, copied as it is, has what looks like a secret"):
        exported("import my_package", TRAIN.format("my_package.step()"))
    job = tmp_path / "job"
    copied = {str(path.relative_to(job / "my_package")) for path in (job / "my_package").rglob("*") if path.is_file()}
    used = {"__init__.py", "settings.py", "inner/__init__.py", "inner/later.py"}
    assert copied == used | {"table.csv", "inner/data/weights.bin"}
    assert "psutil==" in (job / "requirements.txt").read_text()
    assert "\nmy_package/       yours, as it is beside the notebook\n" in (job / "README.txt").read_text()
    monkeypatch.setattr("labkit.exporting.exporter.MOST_DATA_BYTES", 2)
    with pytest.raises(ValueError, match=r"the package .*my_package holds 0 MiB of other files, too many to copy"):
        exported(TRAIN.format("my_package.LR"))


def test_only_what_a_rank_needs_of_labkit_is_carried(exported, tmp_path):
    exported(
        "import course\nimport labkit\nfrom course.models import ConvNet",
        TRAIN.format("ConvNet, course.datasets.load, labkit.Stopped"),
    )
    carried = {
        str(p.relative_to(tmp_path / "job" / "labkit")) for p in (tmp_path / "job" / "labkit").rglob("*") if p.is_file()
    }
    folders = {
        "protocol": "events framing job lazy modules unpicklable pages pickling redaction storages text",
        "system": "base driver linux macos out_of_memory posix",
        "rank": "capture_locals channels current descendants describe device die_with_parent failure "
        "hooks local_rendezvous log_batcher main notebook_main private_folder process_group recorder "
        "report_collectives settings signals stop_agreement waiting worker",
        "rank/script_compat": "bars children fork_server reuse_process_group",
        "launchers": "environments rank_entry tcp_store",
        "launchers/run_directory": "directory files private records sender",
        "exporting": "script",
    }
    modules = {f"{folder}/{name}.py" for folder, names in folders.items() for name in ("__init__", *names.split())}
    assert carried == modules | {"__init__.py", "LICENSE"}
    of_the_course = {path.name for path in (tmp_path / "job" / "course").rglob("*") if path.is_file()}
    assert of_the_course == {"__init__.py", "datasets.py", "models.py", "digits.npz", "README.md"}
    for name in carried - {"LICENSE"}:
        used = {m.partition(".")[0] for m in imports.imported((tmp_path / "job/labkit" / name).read_text())}
        assert not used & {"plotly", "ipywidgets", "pandas", "IPython", "matplotlib"} or name == "__init__.py"


def test_all_of_a_folder_that_is_needed_is_carried(exported, tmp_path):
    """`checkpoint` is a public name and a folder, whose modules import each other."""
    exported("import labkit", TRAIN.format("labkit.Checkpoint, labkit.checkpoint.load"))
    carried = {path.name for path in (tmp_path / "job" / "labkit" / "checkpoint").iterdir()}
    assert carried == {path.name for path in Path(labkit.checkpoint.__file__).parent.glob("*.py")}


def test_requirements_have_the_versions_that_are_installed(exported, tmp_path):
    exported("import course\nimport yaml", TRAIN.format("course.models.resnet50(), yaml"))
    lines = (tmp_path / "job/requirements.txt").read_text().splitlines()
    required = {line for line in lines if not line.startswith("#")}
    assert {line.partition("==")[0].lower() for line in required} == {
        *("cloudpickle", "numpy", "psutil", "pyyaml", "torch", "torchvision")
    }
    assert f"torch=={torch.__version__.partition('+')[0]}" in required


def test_the_batch_script_asks_for_what_is_wanted_and_passes_options_on(exported, tmp_path):
    on = labkit.Slurm(nodes=2, ranks_per_node=4, setup="module load cuda", partition="gpu", gpus_per_node=4)
    exported(TRAIN.format(1), on=on)
    lines = (tmp_path / "job/job.sbatch").read_text().splitlines()
    for line in ("--nodes=2", "--ntasks-per-node=4", "--partition=gpu", "--gpus-per-node=4", "--output=slurm-%j.out"):
        assert f"#SBATCH {line}" in lines
    assert "module load cuda" in lines
    assert lines[-1] == (
        'exec srun --kill-on-bad-exit=1 --export=ALL --ntasks-per-node="$SLURM_NTASKS_PER_NODE" python train.py "$@"'
    )


def test_the_script_for_ray_starts_as_many_ranks(exported, tmp_path):
    exported(TRAIN.format(1), on=labkit.Slurm(nodes=2, ranks_per_node=4))
    text = (tmp_path / "job/submit_ray.py").read_text()
    assert "\nWORLD_SIZE = 8\n" in text
    compile(text, "submit_ray.py", "exec")
    assert "python submit_ray.py" in (tmp_path / "job/README.txt").read_text()


@pytest.mark.spawns
@pytest.mark.check
def test_a_clean_cell_makes_a_clean_script(exported, tmp_path):
    exported(HEAD + "import os", CELLS[1], CELLS[2], CELLS[3])
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--isolated", "--line-length=120", "--select=E,F,W,I", "train.py"],
        cwd=tmp_path / "job",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    formatted = [sys.executable, "-m", "ruff", "format", "--isolated", "--line-length=120", "--diff", "train.py"]
    done = subprocess.run(formatted, cwd=tmp_path / "job", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


# What is refused


REFUSED = {
    "a tensor": (
        "import torch\nW = torch.ones(2)",
        "W",
        "train uses 'W', a Tensor, which cannot be written as source. Make it inside train, or pass",
    ),
    "of a helper": (
        "import torch\nW = torch.ones(2)\ndef helper():\n    return W",
        "helper()",
        "helper uses 'W', a Tensor, which cannot",
    ),
    "a module of torch": (
        "from torch import nn\nloss = nn.MSELoss()",
        "loss",
        "train uses 'loss', a MSELoss, which cannot be written as source",
    ),
    "an open file": ("import sys\nlog = sys.__stdout__", "log", "train uses 'log', a TextIOWrapper"),
    "in a collection": ("import torch\nA = {'w': [torch.ones(1)]}", "A", "train uses 'A', a Tensor"),
    "a list in itself": ("A = []; A.append(A)", "A", "'A', a list that contains itself"),
    "a long list": ("A = list(range(9999))", "A", "'A', 58,884 characters as source. Keep it in a file"),
    "a number of NumPy's": ("import numpy as np\nLR = np.float64(0.1)", "LR", "'LR', a float64"),
    "no such name": ("", "epoch", "train uses 'epoch', which the notebook does not define"),
    "a magic": (
        "",
        "get_ipython().system('ls')",
        "train uses get_ipython, which only a notebook has (a line with % or ! uses get_ipython)",
    ),
    "IPython": (
        "from IPython import display",
        "display",
        "train uses 'display', from IPython, which only a notebook has",
    ),
    "a function that another made": (
        "def make(n):\n    def f():\n        return n\n    return f\nf = make(3)",
        "f()",
        "train uses 'f', which was made inside another function and keeps 'n' from there",
    ),
    "a function from within another": (
        "def make():\n    def f():\n        return 1\n    return f\nf = make()",
        "f()",
        "train uses 'f', a function made in the middle of other code (line 2 of cell 1)",
    ),
    "a lambda in other code": (
        "fs = [lambda x: x]\nf = fs[0]",
        "f(1)",
        "train uses 'f', a lambda made in the middle of other code (line 1 of cell 1)",
    ),
    "wrapped without saying so": (
        "import torch\ndef step():\n    pass\nfast = torch.no_grad()(step)",
        "fast()",
        "train uses 'fast', which is step wrapped by something that its source does not say",
    ),
    "two of one name": (
        "def f():\n    return 1\ndef g():\n    return f()\nold = f\n# ---\ndef f():\n    return 2",
        "old(), g()",
        "it needs two things called 'f'",
    ),
    "defined by a magic": (
        "exec(compile('def f():\\n    pass', '<timed exec>', 'exec'))",
        "f()",
        "'f', a function whose source is not to be found. It may come from a cell that a magic runs",
    ),
    "in a circle": (
        "WAYS = {}\ndef way(f):\n    WAYS[1] = f\n    return f\n@way\ndef one():\n    return WAYS",
        "WAYS, one()",
        "its parts need each other before they are there",
    ),
    "what is of the notebook": (
        "import labkit",
        "labkit.launch",
        "it uses labkit.launcher, which is of the notebook and not of the ranks",
    ),
    "a made-up module": (
        "import types\nm = types.ModuleType('m')",
        "m",
        "train uses the module 'm', which cannot be imported",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_is_refused_by_name_and_nothing_is_written(what, exported, tmp_path):
    cells, returned, said = REFUSED[what]
    with pytest.raises(ValueError, match=re.escape(said)) as refused:
        exported(*split(cells), TRAIN.format(returned))
    assert str(refused.value).startswith("train cannot be exported: ")
    assert not (tmp_path / "job").exists()


def test_a_folder_without_a_source_is_refused(exported, tmp_path, monkeypatch):
    (tmp_path / "my_folder").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    imports.local_file.cache_clear()
    with pytest.raises(ValueError, match=r"uses 'my_folder', from my_folder, which lies in .*, is not installed and"):
        exported("import my_folder", TRAIN.format("my_folder"))


@pytest.mark.parametrize(
    ("given", "arguments", "kind", "said"),
    [
        (len, {}, TypeError, "export() takes a function written with def, got a builtin_function_or_method"),
        (lambda worker: 1, {}, TypeError, "got a lambda; give it a name"),
        ("plain", {"on": 2}, TypeError, "on is labkit.Slurm(…), what job.sbatch asks for, got 2"),
        ("plain", {"seed": "a"}, TypeError, "seed is a whole number or None, got 'a'"),
        ("plain", {"epoch": 1}, TypeError, "train(worker, epochs=1) cannot be called as train(worker, epoch=…)"),
        ("plain", {"epochs": torch.ones(1)}, ValueError, "the argument epochs=…, a Tensor, which cannot be written"),
        (
            "seeded",
            {"seed": 1},
            ValueError,
            "train has a parameter called 'seed', but export() keeps seed=… for itself",
        ),
        ("by place", {}, TypeError, "train takes 'epochs' by position only"),
        ("waits", {}, TypeError, "train is an async function"),
    ],
)
def test_arguments_of_no_use_are_refused(given, arguments, kind, said, notebook, tmp_path):
    texts = {
        "plain": "def train(worker, epochs=1):\n    pass",
        "seeded": "def train(worker, seed=1):\n    pass",
        "by place": "def train(worker, epochs, /):\n    pass",
        "waits": "async def train(worker):\n    pass",
    }
    if isinstance(given, str):
        notebook.run(texts[given])
        given = notebook.names["train"]
    with pytest.raises(kind, match=re.escape(said)):
        labkit.export(given, tmp_path / "job", **arguments)
    assert not (tmp_path / "job").exists()


# The folder


def test_a_folder_with_anything_else_in_it_is_left_alone(exported, tmp_path):
    (tmp_path / "job").mkdir()
    (tmp_path / "job/notes.txt").write_text("mine")
    with pytest.raises(
        ValueError, match=r"job is not empty \(notes.txt\) and was not written by export\(\); give a new"
    ):
        exported(TRAIN.format(1))
    assert [p.name for p in (tmp_path / "job").iterdir()] == ["notes.txt"]


def test_an_earlier_export_is_replaced_and_what_came_later_stays(exported, tmp_path):
    exported("import labkit", TRAIN.format("labkit.Checkpoint"))
    (tmp_path / "job/log").mkdir()
    text = exported(TRAIN.format(2))
    assert "return 2" in text
    assert (tmp_path / "job/log").is_dir()
    assert not (tmp_path / "job/labkit/checkpoint/__init__.py").exists()


def test_a_file_that_the_reader_changed_is_not_replaced(exported, tmp_path):
    exported(TRAIN.format(1))
    (tmp_path / "job/train.py").write_text("mine")
    with pytest.raises(
        ValueError, match=r"train.py has been changed since it was exported; rename it, or give another"
    ):
        exported(TRAIN.format(2))
    assert (tmp_path / "job/train.py").read_text() == "mine"


def test_a_file_in_the_way_is_not_replaced(exported, tmp_path):
    (tmp_path / "job").write_text("mine")
    with pytest.raises(ValueError, match=r"job is a file; export\(\) needs a folder"):
        exported(TRAIN.format(1))
    (tmp_path / "job").unlink()
    exported(TRAIN.format(1))
    (tmp_path / "job/labkit/checkpoint").mkdir()
    (tmp_path / "job/labkit/checkpoint/__init__.py").write_text("mine")
    with pytest.raises(ValueError, match=r"__init__.py is there already and was not written by export\(\)"):
        exported("import labkit", TRAIN.format("labkit.Checkpoint"))


# Options


def train(
    worker,
    batch_size=128,
    epochs=2,
    checkpoint=None,
    lr: float = 1,
    betas=(0.9, 0.99),
    *,
    bn=True,
    root: Path | None = None,
    data_root: str,
    extra={"a": 1},  # noqa: B006
    h=1,
):
    """Train, 100 % of it."""


def chosen(*words, **arguments):
    return script.options(train, {"data_root": "d", **arguments}, 0).parse(list(words))


def test_options_have_the_functions_names_types_and_defaults():
    defaults, seed, threads = chosen()
    assert defaults == {
        "batch_size": 128,
        "epochs": 2,
        "checkpoint": None,
        "lr": 1,
        "betas": (0.9, 0.99),
        "bn": True,
        "root": None,
        "data_root": "d",
        "extra": {"a": 1},
        "h": 1,
    }
    assert (seed, threads) == (0, None)
    words = "-b 64 -e 3 -c runs/1 --lr 1e-3 --betas 0.5 0.6 --no-bn --root x --seed 4 --threads 2 --data-root y"
    values, seed, threads = chosen(*words.split())
    given = {"batch_size": 64, "epochs": 3, "checkpoint": "runs/1", "lr": 1e-3, "betas": (0.5, 0.6), "bn": False}
    assert values == {**defaults, **given, "root": Path("x"), "data_root": "y"}
    assert (seed, threads) == (4, 2)
    assert chosen("-c", "3")[0]["checkpoint"] == 3


def test_what_the_notebook_gave_is_the_default_and_its_type_counts():
    values, seed, _ = script.options(train, {"data_root": "d", "epochs": 90, "checkpoint": "c"}, None).parse(
        ["-c", "3"]
    )
    assert (values["epochs"], values["checkpoint"], seed) == (90, "3", None)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--epochs", "many"], "argument --epochs/-e: invalid int value: 'many'"),
        (["--epoch", "3"], "unrecognized arguments: --epoch 3"),
        (["--extra", "3"], "unrecognized arguments: --extra 3"),
    ],
)
def test_a_wrong_option_is_named(words, said, capsys):
    with pytest.raises(SystemExit):
        chosen(*words)
    assert said in capsys.readouterr().err


def test_an_argument_that_the_notebook_did_not_give_is_required(capsys):
    with pytest.raises(SystemExit):
        script.options(train, {}, 0).parse([])
    assert "the following arguments are required: --data-root" in capsys.readouterr().err


def test_short_options_go_to_the_first_with_the_letter():
    flags = {action.dest: action.option_strings for action in script.options(train, {}, 0).parser._actions}
    assert flags["batch_size"] == ["--batch-size", "-b"]
    assert flags["betas"] == ["--betas"]
    assert flags["root"] == ["--root", "-r"]
    assert flags["h"] == ["--h"]  # -h is help


def test_help_says_what_every_option_is(capsys):
    with pytest.raises(SystemExit):
        chosen("--help")
    said = " ".join(capsys.readouterr().out.split())
    assert "Train, 100 % of it." in said
    assert "--batch-size N, -b N (default: 128)" in said
    assert "set in the script: extra = {'a': 1}" in said
    assert "--seed N rank r begins with the random numbers of SEED + r (default: 0)" in said


def test_a_function_with_a_seed_of_its_own_keeps_the_word():
    def train(worker, seed=3, threads=4): ...

    assert script.options(train, {}, 0).parse(["--seed", "5"]) == ({"seed": 5, "threads": 4}, 0, None)


def test_a_rank_that_something_else_has_started_is_told_so(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(RuntimeError, match="RANK is set, but not by torchrun or srun"):
        script.rank_info_here()


# Running


CELLS = (
    HEAD + "import hashlib, sys\nimport labkit\nfrom torch.nn.parallel import DistributedDataParallel\n",
    """
    WIDTH = 16


    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(8, WIDTH), nn.Dropout(0.1), nn.Linear(WIDTH, 1))

        def forward(self, inputs):
            return self.layers(inputs)
    """,
    """
    def gather(value):
        found = [None] * dist.get_world_size()
        dist.all_gather_object(found, value)
        return found
    """,
    """
    def train(worker, epochs, fail=False):
        for _ in range(epochs):
            worker.log(loss=torch.nn.functional.mse_loss(Net()(torch.zeros(1, 8)), torch.zeros(1, 1)))
        if fail:
            raise ValueError("bad batch")
        return gather(worker.rank)
    """,
)
DDP_TRAIN = """
def train(worker, steps=6, fail=False):
    model = DistributedDataParallel(Net().to(worker.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        loss = model(torch.randn(64, 8, device=worker.device)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        worker.log(loss=loss.item(), threads=torch.get_num_threads())
    if fail and worker.rank == worker.world_size - 1:
        raise ValueError("bad batch")
    sha = hashlib.sha256()
    for weight in model.module.state_dict().values():
        sha.update(weight.cpu().numpy().tobytes())
    return {"weights": gather(sha.hexdigest()), "labkit": labkit.__file__}
"""


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """An exported folder, and the weights that the notebook's own launch ends with."""
    notebook = Notebook()
    for cell in (*CELLS[:3], DDP_TRAIN):
        notebook.run(cell)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(statements.kernel, "cells", lambda: notebook.cells)
        folder = labkit.export(notebook.names["train"], tmp_path_factory.mktemp("exported") / "job", steps=8)
    run = labkit.launch(notebook.names["train"], world_size=2, steps=8)
    return folder, run.results[0]["weights"], run.history.loss.tolist()


WITHOUT = """
import sys
from importlib.machinery import PathFinder


class FewerAreInstalled(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name in {names} else super().find_spec(name, path, target)


sys.meta_path = [FewerAreInstalled if finder is PathFinder else finder for finder in sys.meta_path]
"""


def plain(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def with_what_they_require(lines):
    """Names of the packages that pip would install for the lines of a requirements.txt."""
    found, todo = set(), [Requirement(line) for line in lines if not line.startswith("#")]
    while todo:
        requirement = todo.pop()
        if plain(requirement.name) in found or not (requirement.marker is None or requirement.marker.evaluate()):
            continue
        try:
            distribution = importlib.metadata.distribution(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            continue  # for another system
        assert requirement.specifier.contains(distribution.version, prereleases=True), requirement
        found.add(plain(requirement.name))
        todo += [Requirement(line) for line in distribution.requires or []]
    return found


@pytest.fixture
def moved(job, tmp_path):
    """The folder in another place, and beside it what makes all that it does not require as if not installed."""
    folder, weights, _ = job
    shutil.copytree(folder, tmp_path / "elsewhere")
    installed = with_what_they_require((folder / "requirements.txt").read_text().splitlines())
    providers = importlib.metadata.packages_distributions()
    missing = {top for top, names in providers.items() if not installed & set(map(plain, names))} - {"labkit"}
    assert {"plotly", "pandas", "ipywidgets", "IPython", "matplotlib", "torchvision"} <= missing
    (tmp_path / "sitecustomize.py").write_text(WITHOUT.format(names=missing))
    return tmp_path / "elsewhere", weights


def start(folder, *command, **environment):
    """Run a command in the folder, as where only what it requires is installed."""
    kept = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    # torchrun leaves a folder. Not in tmp_path: a socket's path may have 107 characters, and that one has most of them.
    with tempfile.TemporaryDirectory(prefix="export-") as temporary:
        kept |= {"PYTHONPATH": str(folder.parent), "TMPDIR": temporary}
        return subprocess.run(
            command,
            cwd=folder,
            env={**kept, **environment},
            capture_output=True,
            text=True,
            timeout=5 * LONG_S,
            check=False,
        )


def result(folder, rank=0):
    (file,) = folder.glob(f"log/*/result-{rank}.pt")
    return torch.load(file)


TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


@pytest.mark.spawns
def test_torchrun_gives_the_notebooks_weights(moved, job):
    folder, weights = moved
    (line,) = re.findall(r"^    torchrun (.* train\.py)$", (folder / "README.txt").read_text(), re.MULTILINE)
    done = start(folder, *TORCHRUN, *line.split())
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        assert result(folder, rank) == {"weights": weights, "labkit": str(folder / "labkit/__init__.py")}
    assert f"2 ranks, logging to {folder}/log/" in done.stdout
    assert f'finished, returned {{"weights": ["{weights[0]}", ' in done.stdout

    import pandas as pd

    logged = pd.concat(pd.read_json(file, lines=True) for file in sorted(folder.glob("log/*/rank-*.jsonl")))
    assert list(logged.columns) == ["rank", "step", "time_s", "loss", "threads"]
    assert sorted(logged.loss) == pytest.approx(sorted(job[2]), abs=1e-9)


@pytest.mark.wide
@pytest.mark.spawns
def test_on_ray_it_gives_the_notebooks_weights_and_brings_back_what_was_logged(job, ray_cluster, tmp_path):
    """As `ray job submit` starts it; that needs Ray's dashboard, which is off here."""
    folder, weights, losses = job
    command = [sys.executable, "submit_ray.py", "--out", str(tmp_path), "--", "--steps", "8"]
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "RAY_ADDRESS": ray_cluster.address},
        capture_output=True,
        text=True,
        timeout=5 * LONG_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        found = result(tmp_path, rank)
        assert found["weights"] == weights
        assert not found["labkit"].startswith((str(folder), str(Path(labkit.__file__).parent))), "it was taken along"
    rows = [file.read_text().splitlines() for file in sorted(tmp_path.glob("log/*/rank-*.jsonl"))]
    logged = [json.loads(row)["loss"] for lines in rows for row in lines]
    assert sorted(logged) == pytest.approx(sorted(losses), abs=1e-9)
    assert not (folder / "log").exists()


@pytest.mark.spawns
def test_alone_it_is_one_rank_and_options_count(moved):
    folder, _ = moved
    done = start(folder, sys.executable, "train.py", "--steps", "3", "--threads", "1", "--seed", "5")
    assert done.returncode == 0, done.stderr
    assert len(result(folder)["weights"]) == 1
    (log,) = folder.glob("log/*-1-rank/rank-0.jsonl")
    assert [ast.literal_eval(row)["threads"] for row in log.read_text().splitlines()] == [1.0] * 3
    asked = json.loads(log.with_name("options.json").read_text())
    assert asked.pop("arguments")["steps"] == 3
    assert asked == {"function": "train", "seed": 5, "threads": 1, "ranks": 1}, "the run says with what it was started"


@pytest.mark.spawns
def test_a_rank_that_fails_ends_all_and_shows_the_scripts_lines(moved):
    folder, _ = moved
    done = start(folder, *TORCHRUN, "--standalone", "--nproc-per-node=2", "train.py", "--fail")
    assert done.returncode == 1
    assert "rank 1 failed while running:" in done.stderr
    assert re.search(
        r'File ".*/elsewhere/train.py", line \d+, in train\n\s+raise ValueError\("bad batch"\)', done.stderr
    )


LOADING = """
import sys
from torch.utils.data import DataLoader, Dataset

class Squares(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return index**2, "labkit.rank.script_compat.fork_server" in sys.modules

def train(worker):
    loader = DataLoader(Squares(), 4, num_workers=2, multiprocessing_context="forkserver")
    return [(squares.tolist(), prepared.tolist()) for squares, prepared in loader]
"""


@pytest.mark.spawns
def test_workers_from_a_fork_server_load_the_scripts_data(exported, tmp_path):
    """As on Python 3.14 all workers are begun. That server ends with its rank, as one of a launched function does."""
    exported(LOADING)
    done = start(tmp_path / "job", sys.executable, "train.py")
    assert done.returncode == 0, done.stderr
    assert result(tmp_path / "job") == [([0, 1, 4, 9], [True] * 4), ([16, 25, 36, 49], [True] * 4)]


@pytest.mark.cluster
@pytest.mark.wide
def test_sbatch_gives_the_notebooks_weights(moved):
    folder, weights = moved
    with cluster.running() as slurm:
        path = os.pathsep.join([str(Path(sys.executable).parent), cluster.PATH])
        two_nodes = ["--nodes=2", "--ntasks-per-node=1", "job.sbatch", "--threads", str(max(1, host.cores() // 2))]
        for options in (["job.sbatch"], two_nodes):
            done = start(folder, "sbatch", *options, PATH=path, SLURM_CONF=slurm.configuration)
            assert done.returncode == 0, done.stderr
            wait_until(lambda: not slurm.jobs(), 5 * LONG_S)
            said = "\n".join(file.read_text() for file in folder.glob("slurm-*.out"))
            assert "finished" in said, said
            assert result(folder)["weights"] == weights
            assert not list(folder.glob("log/rendezvous*"))
            shutil.rmtree(folder / "log")


@pytest.mark.kernel
def test_a_real_notebooks_cells_are_found(tmp_path):
    """IPython replaces `open`, changes lines with magics, and keeps a cell's text where its number leads."""
    kernel = Kernel(tmp_path)
    try:
        kernel.run("class Net(torch.nn.Linear):\n    size = 3")
        kernel.run("def train(worker):\n    with open('x') as file:\n        return Net(1, 1), exit, file")
        kernel.run("labkit.export(train, 'job')")
        text = (tmp_path / "job/train.py").read_text()
        assert body(text).startswith(
            "import torch\n\n\nclass Net(torch.nn.Linear):\n    size = 3\n\n\ndef train(worker):"
        )
        kernel.run("def train(worker):\n    !ls")
        refused = kernel.run("labkit.export(train, 'job')", fails=True)
        assert "train uses get_ipython, which only a notebook has" in refused.error["evalue"]
        kernel.run("%%time\ndef train(worker):\n    return 1")
        refused = kernel.run("labkit.export(train, 'job')", fails=True)
        assert "a cell that a magic runs, such as %%time" in refused.error["evalue"]
    finally:
        kernel.close()
