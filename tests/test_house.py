"""The house: the core stands without its wings; the public names are what they are said to be."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import labkit
import labkit.plugins
from labkit.protocol import plugins
from tests.conftest import LONG_S

PACKAGE = Path(labkit.__file__).parent
CORE = ("__init__.py", "launcher.py", "protocol", "rank", "engines", "failures", "monitor", "ui")
WINGS = sorted(path.name for path in PACKAGE.iterdir() if path.name not in (*CORE, "py.typed", "__pycache__"))
PLUGINS = sorted(path.parent.name for path in (PACKAGE / "plugins").glob("*/__init__.py"))
PARTS = [*WINGS, *(f"plugins/{name}" for name in PLUGINS)]
"""What can be deleted."""

ALL = "all of them"

NO_OTHER_COPY = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "__editable__" not in getattr(finder, "__module__", "")]
"""
"""An editable install would quietly give back, from the tree where it lies, what is gone here."""

LAUNCH = """
import sys
import time

def train(worker):
    worker.log(loss=1.0)
    return worker.rank

def fail(worker):
    worker.log(loss=1.0)
    if worker.rank:
        raise ValueError("bad batch")
    import torch.distributed as dist
    dist.barrier()

def stuck(worker):
    worker.log(loss=1.0)
    time.sleep(1e6)

def main(folders):
    for folder in folders:  # torch stays; labkit is another copy each time
        for name in [name for name in sys.modules if name.partition(".")[0] == "labkit"]:
            del sys.modules[name]
        sys.path[0] = folder
        import labkit
        assert labkit.__file__.startswith(folder), labkit.__file__
        run = labkit.launch(train, world_size=2, live=False)
        assert run.results == [0, 1], run.results
        assert len(run.figure().data) and "loss" in run.history
        labkit.show(run)
        if folder is folders[-1]:  # without any part
            try:
                labkit.launch(fail, world_size=2, live=False, timeout_s=60)
            except labkit.WorkerFailed as error:
                assert str(error).startswith("rank 1 failed: ValueError: bad batch (after logging step 0)"), error
            try:
                labkit.launch(stuck, world_size=2, live=False, timeout_s=0.5)
            except labkit.WorkerFailed as error:
                assert str(error).startswith("no rank logged, printed or returned anything for 0.5 s"), error
        if folder in (folders[0], folders[-1]):
            run = labkit.launch(stuck, world_size=2, live=False, wait=False)
            while run.recorded.progress(0).last_step is None:
                time.sleep(0.01)
            try:
                assert "in time.sleep at start.py" in str(run.stacks()), run.stacks()
            except ModuleNotFoundError as error:
                assert str(error).startswith("run.stacks() needs labkit.plugins.stacks"), error
                assert folder is folders[-1], folder
            else:
                assert folder is folders[0]
            assert run.stop().status == "stopped"
        print("stands:", folder, flush=True)

if __name__ == "__main__":
    sys.path.insert(0, sys.argv[1])
    import prefork
    forker = prefork.Forker.start(("torch.nn.parallel",))  # torch stays there, too, but no copy of labkit
    with prefork.in_use(forker=lambda *_: forker):
        main(sys.argv[2:])
"""


def modules(*rooms):
    return [
        path
        for room in rooms
        for path in ([PACKAGE / room] if room.endswith(".py") else (PACKAGE / room).rglob("*.py"))
    ]


THREADS_OWN = {"_handle", "_os_thread_handle", "_context"}
"""What Python 3.13 and 3.14 keep in each thread, besides what this Python does."""


def test_no_thread_of_ours_takes_an_attribute_that_is_pythons():
    for node in (node for path in modules(*CORE, *WINGS) for node in ast.walk(ast.parse(path.read_text()))):
        if isinstance(node, ast.ClassDef) and "threading.Thread" in map(ast.unparse, node.bases):
            taken = {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute) and is_set_on_self(n)}
            assert not taken & (THREADS_OWN | set(vars(threading.Thread()))), node.name


def is_set_on_self(node):
    return isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"


def test_the_public_names_are_those_that_type_checkers_see():
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    seen = sorted(alias.asname or alias.name for node in block.body for alias in node.names)
    assert seen == sorted(labkit.__all__) == sorted([*labkit._HOMES, *labkit._MODULES]) == dir(labkit)
    for name in labkit.__all__:
        assert getattr(labkit, name) is not None


def test_every_plugin_is_listed_and_says_how_it_takes_part_in_runs():
    assert sorted(labkit.plugins.NAMES) == PLUGINS, "one that is not listed would be left out without a word"
    assert re.findall(r"^    (\w+) +\S", labkit.plugins.__doc__, re.MULTILINE) == list(labkit.plugins.NAMES)
    asks = re.compile(r'plugins\.(?:first|those_with)\("(\w+)"')
    asked = {name for path in modules(*CORE) for name in asks.findall(path.read_text())}
    assert all(f"    {name}(" in plugins.__doc__ for name in asked)
    found = {name: {plugin.__module__ for plugin in plugins.those_with(name)} for name in asked}
    assert all(found.values()), "nobody has a function of this name"
    clashes = [path for name in asked for path in (PACKAGE / "plugins").glob(f"*/{name}.py")]
    assert not clashes, "once imported, the module would be in the function's place"
    assert set.union(*found.values()) == set(plugins.names()), "and everybody has one"


def copy_without(gone, folder):
    """Copy the package, but for these parts."""
    shutil.copytree(
        PACKAGE,
        folder / "labkit",
        ignore=lambda path, names: {name for name in names if str((Path(path) / name).relative_to(PACKAGE)) in gone},
    )
    return str(folder)


@pytest.fixture(scope="module")
def stands(tmp_path_factory):
    """What a process says that launches from one copy after another, each without a part, the last without any."""
    folder = tmp_path_factory.mktemp("copies")
    copies = [copy_without({part}, folder / part) for part in PARTS] + [copy_without(set(WINGS), folder / ALL)]
    (folder / "sitecustomize.py").write_text(NO_OTHER_COPY)
    (folder / "start.py").write_text(LAUNCH)
    done = subprocess.run(
        [sys.executable, "start.py", str(Path(__file__).parent), *copies],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=5 * LONG_S,
        check=False,
    )
    return done.stdout + done.stderr


@pytest.mark.spawns
@pytest.mark.parametrize("part", [*PARTS, ALL])
def test_the_core_stands_without_a_wing_and_without_a_plugin(part, stands):
    assert any(line.startswith("stands:") and line.endswith(f"/{part}") for line in stands.splitlines()), stands
