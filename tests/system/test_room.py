"""The one room that knows the operating system: nothing goes around it, and its two systems are complete."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import labkit
from labkit.system.base import System
from labkit.system.linux import Linux
from labkit.system.macos import MacOS

PACKAGE = Path(labkit.__file__).parent
MODULES_OF_THE_SYSTEM = {"fcntl", "resource", "termios", "pwd", "grp", "ctypes"}

ALLOWED = {
    "__init__.py: sys.platform": "to say on Windows what to use",
}

SIGNALS = {"SIGINT", "SIGTERM", "SIG_IGN", "SIG_DFL", "SIG_BLOCK", "SIG_UNBLOCK"}


def goes_around(path):
    """Return what a module asks of the system itself."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    documents = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="sys"), attr="platform"):
                yield "sys.platform"
            case ast.Attribute(value=ast.Name(id="os"), attr="name" | "uname" | "waitid"):
                yield f"os.{node.attr}"
            case ast.Attribute(value=ast.Name(id="signal"), attr=attr) if re.match("SIG", attr):
                if attr not in SIGNALS:
                    yield f"signal.{attr}"
            case ast.Call(func=ast.Name(id="getattr" | "hasattr"), args=[ast.Name(id="signal" | "os"), name, *_]):
                if ast.unparse(name).strip("'\"") not in FEATURES:
                    yield ast.unparse(node)
            case ast.Import(names=names) if set_of_tops(alias.name for alias in names) & MODULES_OF_THE_SYSTEM:
                yield ast.unparse(node)
            case ast.ImportFrom(module=str(module)) if module.partition(".")[0] in MODULES_OF_THE_SYSTEM:
                yield ast.unparse(node)
            case ast.alias(name="_prctl_pr_set_pdeathsig"):
                yield node.name
            case ast.Constant(value=str(text)) if id(node) not in documents and re.match(r"/(proc|sys)\b", text):
                yield text


def set_of_tops(names):
    return {name.partition(".")[0] for name in names}


FEATURES = {"sched_getaffinity", "getuid"}
"""What Python has on some systems only, and may be looked for where it is used."""


def test_only_this_room_asks_the_operating_system():
    found = [
        f"{path.relative_to(PACKAGE).as_posix()}: {what}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.parent != PACKAGE / "system"
        for what in goes_around(path)
    ]
    assert [what for what in found if what not in ALLOWED] == []
    assert set(ALLOWED) <= set(found), "what is allowed is also done"


def test_a_system_adds_nothing_that_the_others_are_not_asked_for():
    for each in (Linux, MacOS):
        assert {name for name in vars(each) if not name.startswith("_")} <= set(vars(System)), each


@pytest.mark.spawns
def test_on_windows_an_import_says_what_to_use():
    code = "import sys; sys.platform = 'win32'; import labkit"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1].startswith("ImportError: labkit runs on Linux and macOS. On Windows, use WSL2")
