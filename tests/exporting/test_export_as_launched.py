"""An exported job is the program that was launched: what no source says any more is written as it is, or refused."""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import sys
import textwrap
import warnings

import pytest

import labkit
from labkit.exporting import describe, rehearsal
from labkit.exporting.source import Script
from labkit.protocol.pickling import dumps
from tests.conftest import LONG_S
from tests.exporting.test_export import exported, notebook, split  # noqa: F401 - fixtures
from tests.support.random_notebooks import cells_of
from tests.support.tiers import few


def run_in(text):
    """What the `train` of a script returns; the script runs as the main module, without its last line."""
    names = {"__name__": "a job"}
    exec(compile(text, "train.py", "exec", dont_inherit=True), names)
    return names["train"](None)


FORMS = {
    "a class attribute set later": ("class Net:\n    scale = 0.1", "Net.scale", "Net.scale = 0.5", 0.5),
    "a class attribute without a value of its own": ("class Net:\n    pass", "Net.scale", "Net.scale = 0.5", 0.5),
    "the default of a helper": ("LR = 0.1\ndef f(lr=LR):\n    return lr", "f()", "LR = 0.5", 0.1),
    "a keyword's default": ("LR = 0.1\ndef f(*, lr=LR):\n    return lr", "f()", "LR = 0.5", 0.1),
    "the default of a method": (
        "LR = 0.1\nclass Net:\n    @staticmethod\n    def f(lr=LR):\n        return lr",
        "Net.f()",
        "LR = 0.5",
        0.1,
    ),
    "the default of a lambda": ("LR = 0.1\nf = lambda lr=LR: lr", "f()", "LR = 0.5", 0.1),
    "the default below a decorator": (
        "import functools\nLR = 0.1\n@functools.cache\ndef f(lr=LR):\n    return lr",
        "f()",
        "LR = 0.5",
        0.1,
    ),
    "a dataclass's field": (
        "import dataclasses\nLR = 0.1\n@dataclasses.dataclass\nclass C:\n    lr: float = LR",
        "(C().lr, C.lr, dataclasses.fields(C)[0].default)",
        "LR = 0.5",
        (0.1, 0.1, 0.1),
    ),
    "a dataclass's attribute, of which its __init__ knows nothing": (
        "import dataclasses\n@dataclasses.dataclass\nclass C:\n    lr: float = 0.1",
        "(C().lr, C.lr)",
        "C.lr = 0.5",
        (0.1, 0.5),
    ),
    "a named tuple's field": (
        "from typing import NamedTuple\nLR = 0.1\nclass C(NamedTuple):\n    lr: float = LR",
        "(C().lr, C._field_defaults)",
        "LR = 0.5",
        (0.1, {"lr": 0.1}),
    ),
    "a member of an enumeration": (
        "import enum\nLR = 0.1\nclass C(enum.Enum):\n    lr = LR",
        "C.lr.value",
        "LR = 0.5",
        0.1,
    ),
    "what a class's body computes": ("LR = 0.1\nclass Net:\n    scales = [LR, 2]", "Net.scales", "LR = 0.5", [0.1, 2]),
    "a list in a class that has grown": ("class Net:\n    seen = []", "Net.seen", "Net.seen.append(1)", [1]),
    "a default that has grown": ("def f(seen=[]):\n    return seen", "f()", "f().append(1)", [1]),
    "an attribute given to a function": ("def f():\n    return f.tag", "f()", "f.tag = 5", 5),
    "an attribute given to a method": (
        "class Net:\n    def f(self):\n        pass",
        "Net.f.tag",
        "Net.f.tag = [5]",
        [5],
    ),
    "a method given to a class": ("class Net:\n    pass", "Net().f()", "def g(self):\n    return 7\nNet.f = g", 7),
    "a method that replaces another": (
        "class Net:\n    def f(self):\n        return 1",
        "Net().f()",
        "def g(self):\n    return 7\nNet.f = g",
        7,
    ),
    "registrations of singledispatch": (
        """
        import functools
        @functools.singledispatch
        def f(x):
            return "any"
        @f.register
        def _(x: int):
            return "int"
        @f.register(str)
        def _(x):
            return "str"
        @f.register
        def of_list(x: list):
            return "list"
        def of_dict(x):
            return "dict"
        """,
        "(f(1.0), f(1), f(''), f([]), f({}))",
        "f.register(dict, of_dict)",
        ("any", "int", "str", "list", "dict"),
    ),
    "one dict under two names": ("A = {}\nB = A", "(A is B, B)", "A['x'] = 1", (True, {"x": 1})),
    "one list in a dict": ("A = []\nB = {'a': A}", "(A is B['a'], B)", "A.append(1)", (True, {"a": [1]})),
    "one list in a default and under a name": ("A = []\ndef f(a=A):\n    return a", "f() is A", "A.append(1)", True),
}
"""Cells, what `train` returns, a cell that changes something then, and what the launched `train` returns."""


@pytest.mark.parametrize("form", few(FORMS, 3))
def test_what_has_changed_since_is_written_as_it_is_now(form, exported):  # noqa: F811
    cells, seen, change, expected = FORMS[form]
    text = exported(textwrap.dedent(cells), change, f"def train(worker):\n    return {seen}")
    assert run_in(text) == expected


def test_of_the_function_itself_too(exported):  # noqa: F811
    text = exported("LR = 0.1", "def train(worker, lr=LR):\n    return lr", "LR = 0.5")
    assert run_in(text) == 0.1
    assert "def train(worker, lr=0.1):" in text


def test_a_random_default_is_the_notebooks(exported, notebook):  # noqa: F811
    text = exported("import random\ndef f(x=random.random()):\n    return x", "def train(worker):\n    return f()")
    assert run_in(text) == notebook.names["train"](None)


REFUSED = {
    "a decorator that was defined again": (
        "def times(f):\n    return lambda: 2 * f()\n# ---\n@times\ndef f():\n    return 3",
        "f()",
        "def times(f):\n    return lambda: 100 * f()",
        "the code of f is .* in the notebook, but its source now gives .*Run the cell that defines 'f' again",
    ),
    "a base class that was defined again": (
        "class Base:\n    kind = 'a'\n# ---\nclass Net(Base):\n    pass",
        "Net.kind",
        "class Base:\n    kind = 'b'",
        "Run the cell that defines 'Net' again",
    ),
    "a counter inside a decorator": (
        """
        def counted(f):
            calls = 0
            def inner():
                nonlocal calls
                calls += 1
                return calls
            return inner
        # ---
        @counted
        def f():
            pass
        """,
        "f()",
        "f()",
        "'calls' inside f is 1 in the notebook, but its source now gives 0",
    ),
    "a tensor as a default, drawn at random": (
        "import torch\ndef f(x=torch.rand(2)):\n    return x",
        "f()",
        "",
        r"the default x= of f is .* in the notebook, but .* what no cell gives again is made inside train",
    ),
    "a list that a decorator fills": (
        "SEEN = []\ndef noted(f):\n    SEEN.append(1)\n    return f\n@noted\ndef f():\n    return len(SEEN)",
        "(f(), SEEN)",
        "",
        r"SEEN.* once the job's definitions have run.*Make it inside train",
    ),
    "what is not there in a fresh process": (
        "SIZES = {'a': 1}\ndef f(n=SIZES['a']):\n    return n",
        "f()",
        "del SIZES['a']",
        r"what it uses cannot be defined in a fresh process: KeyError: 'a' in `def f\(n=SIZES\['a'\]\):`",
    ),
    "one object in two lists": (
        "a = {}\nA, B = [a], [a]\ndel a",
        "A[0] is B[0]",
        "",
        r"B\[0\] is the same object as A\[0\] in the notebook, and another object once",
    ),
}


@pytest.mark.parametrize("form", REFUSED)
def test_what_cannot_be_written_is_refused_by_name(form, exported, tmp_path):  # noqa: F811
    cells, seen, change, said = REFUSED[form]
    with pytest.raises(ValueError, match=f"(?s)^train cannot be exported: .*{said}"):
        exported(*split(cells), *filter(None, [change]), f"def train(worker):\n    return {seen}")
    assert not (tmp_path / "job").exists()


@pytest.mark.spawns
def test_the_comparison_runs_in_a_process_of_its_own(notebook, tmp_path, monkeypatch, capfd):  # noqa: F811
    monkeypatch.undo()
    monkeypatch.setattr("labkit.exporting.statements.kernel.cells", lambda: notebook.cells)
    notebook.run("import os\nAPI_KEY = 'sk-123456789'\nLR = 0.1")
    notebook.run("print('defined')\ndef train(worker, lr=LR, pid=os.getpid()):\n    return API_KEY")
    notebook.run("LR = 0.5")
    with pytest.warns(UserWarning, match="it reads API_KEY from the environment"):
        folder = labkit.export(notebook.names["train"], tmp_path / "job")
    text = (folder / "train.py").read_text()
    assert f"def train(worker, lr=0.1, pid={os.getpid()}):" in text
    assert "sk-123" not in text
    notebook.run("import os\nos._exit(3) if __name__ != '__main__' else None\ndef f(x=os.getpid.__self__):\n    pass")
    notebook.run("def crash():\n    os._exit(3)\ndef train(worker):\n    return f()")
    notebook.run("def quits(f):\n    MODE == 'job' and os._exit(3)\n    return f\nMODE = 'notebook'")
    notebook.run("@quits\ndef f():\n    pass\nMODE = 'job'")
    with pytest.raises(ValueError, match="cannot be defined in a fresh process: Python ended with exit code 3"):
        labkit.export(notebook.names["train"], tmp_path / "other")


def test_a_path_of_this_machine_is_named(exported, tmp_path):  # noqa: F811
    (tmp_path / "data").mkdir()
    cells = (
        f"ROOT = '{tmp_path}/data'\nOUT = '{tmp_path}/out.txt'\nNOT = ('/', '/dev/null', '/no/such/folder', 'a/b')",
        f"def train(worker, root='{tmp_path}'):\n    return ROOT, OUT, NOT",
    )
    said = f"train.py names what is on this machine: {tmp_path}/out.txt, {tmp_path}/data. Where the job runs"
    with pytest.warns(UserWarning, match=re.escape(said)):
        exported(*cells)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        exported("def train(worker, root):\n    return root", root=str(tmp_path))


# Notebooks at random


ASKED = """
import base64, json, sys
from labkit.protocol.pickling import loads

def result(make):
    try:
        return repr(make()(None))
    except Exception as error:
        return f"{type(error).__name__}: {error}"

def of_script(text):
    names = {"__name__": "__main__", "__file__": "train.py"}
    exec(compile(text.split("\\n\\n\\nif __name__ ==")[0], "train.py", "exec"), names)
    return names["train"]

for line in sys.stdin:
    launched, *scripts = json.loads(line)
    launch = result(lambda: loads(base64.b64decode(launched)))
    print(json.dumps([launch, *(result(lambda: of_script(text)) for text in scripts)]), flush=True)
"""


def outcomes(count, notebook):  # noqa: F811
    """What each notebook's launch returns, what its job, and what its bare source; and what was refused."""
    asked, refused = [], {}
    for seed in range(count):
        notebook.names.clear()
        notebook.names["__name__"] = "__main__"
        notebook.cells.clear()
        for cell in cells_of(seed):
            notebook.run(cell)
        train = notebook.names["train"]
        launched = base64.b64encode(dumps(train)).decode()
        try:
            script, _ = rehearsal.as_launched(train, {}, lambda script: {"train.py": script.text(0).encode()})
        except ValueError as error:
            refused[seed] = str(error)
            continue
        bare = Script(train, {}).text(0)
        asked.append((seed, [launched, script.text(0), bare]))
    done = subprocess.run(
        [sys.executable, "-c", ASKED],
        input="\n".join(json.dumps(each) for _, each in asked),
        capture_output=True,
        text=True,
        timeout=5 * LONG_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    return {seed: each for (seed, _), each in zip(asked, found, strict=True)}, refused


@pytest.mark.spawns
@pytest.mark.parametrize("count", [30, pytest.param(300, marks=pytest.mark.long)])
def test_of_random_notebooks_the_job_returns_what_the_launch_does_or_is_refused_by_name(count, notebook):  # noqa: F811
    equal, refused = outcomes(count, notebook)
    wrong = {seed: (launch, job) for seed, (launch, job, _) in equal.items() if launch != job}
    assert not wrong, f"{len(wrong)} of {count}, the first: {next(iter(wrong.items()))}"
    assert not [launch for launch, _, _ in equal.values() if "Error: " in launch]
    named = r"train cannot be exported: .*(Run the cell that defines '\w+' again|Make it inside train)"
    assert all(re.match(named, said, re.DOTALL) for said in refused.values()), refused
    before = [seed for seed, (launch, _, bare) in equal.items() if launch != bare]
    assert len(before) > count / 10, "sources alone give other programs"
    assert len(equal) > count / 2
    print(f"{count} notebooks: {len(equal)} equal, {len(refused)} refused, {len(before)} wrong by their source alone")


def test_a_description_tells_one_object_from_two():
    shared = [1]

    def described(**names):
        return describe.Description(names, "home").nodes

    assert describe.differences(described(a=shared, b=shared), described(a=[1], b=[1])) != []
    assert describe.differences(described(a=[1], b=[1]), described(a=shared, b=shared)) != []
    assert describe.differences(described(a=shared, b=shared), described(a=shared, b=shared)) == []
    assert describe.differences(described(a=(1, (2,))), described(a=(1, (2,)))) == []
