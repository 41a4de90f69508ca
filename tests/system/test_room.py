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
ALLOWED = {
    "__init__.py: sys.platform": "to say on Windows what to use",
}

GOES_AROUND = re.compile(
    r"""
    sys\.platform | os\.(?:name|uname|waitid)\b | _prctl_pr_set_pdeathsig
    | signal\.SIG(?!INT\b|TERM\b|_IGN|_DFL|_BLOCK|_UNBLOCK)\w+
    | (?:getattr|hasattr)\((?:os|signal),\ (?!'sched_getaffinity'|'getuid')[^)]*  # features that some systems lack
    | ^\ *(?:import|from)\ (?:fcntl|resource|termios|pwd|grp|ctypes)\b
    | '/(?:proc|sys)\b[^']*
    """,
    re.VERBOSE | re.MULTILINE,
)
"""What asks the system, in code without comments and as `ast.unparse` quotes it."""


def test_only_this_room_asks_the_operating_system():
    found = [
        f"{path.relative_to(PACKAGE).as_posix()}: {what}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.parent != PACKAGE / "system"
        for what in GOES_AROUND.findall(ast.unparse(ast.parse(path.read_text(encoding="utf-8"))))
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
