"""`make` on a machine where not all is as it should be. Nothing is installed: the Python that it calls is a script."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from tests.support.repository import ROOT

pytestmark = [
    pytest.mark.spawns,
    pytest.mark.check,
    pytest.mark.skipif(sys.platform != "linux", reason="a script that is run by a script"),
]

PYTHON = """\
#!/bin/sh
case "$1 $2" in
lab.py*) PYTHON="$0" exec "REAL_PYTHON" "$@" ;;
"-m venv")
    mkdir -p "$3/bin"
    cp python "$3/bin/python"
    if [ -e no-ensurepip ]; then echo "ensurepip is not available" >&2; exit 1; fi
    for program in pip jupyter; do
        printf '#!%s/bin/python\\n' "$3" > "$3/bin/$program"
        chmod +x "$3/bin/$program"
    done
    echo made >> log ;;
"-m pip") [ -e "${0%/*}/pip" ] || { echo "No module named pip" >&2; exit 1; }; echo installed >> log ;;
"-m compileall") echo compiled-all >> log ;;
"-c import "*) echo compiled-some >> log ;;
esac
"""
"""Makes an environment as Python does: its programs begin with the whole path of its Python."""


@pytest.fixture
def clone(tmp_path):
    """A folder with what `make setup` reads."""
    folder = tmp_path / "labkit"
    (folder / ".ci").mkdir(parents=True)
    for name in ("Makefile", "lab.py", "pyproject.toml", ".ci/constraints.txt", ".ci/ranges.txt"):
        shutil.copy(ROOT / name, folder / name)
    (folder / "python").write_text(PYTHON.replace("REAL_PYTHON", sys.executable))
    (folder / "python").chmod(0o755)
    return folder


def make(folder, *arguments):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    environment["PIP_NO_INDEX"] = "1"  # nobody is asked for a build of PyTorch
    command = ["make", *arguments, f"PYTHON={folder}/python"]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_what_is_set_up_is_not_set_up_again(clone):
    assert make(clone, "setup").returncode == 0
    assert make(clone, "setup").returncode == 0
    assert (clone / "log").read_text().split() == ["made", "installed", "compiled-all"]


def test_a_python_without_venv_says_which_package_to_install_and_then_make_goes_on(clone):
    (clone / "no-ensurepip").touch()
    failed = make(clone, "lab")
    assert failed.returncode != 0
    assert "sudo apt install python3-venv" in failed.stderr
    (clone / "no-ensurepip").unlink()
    done = make(clone, "lab")
    assert done.returncode == 0, done.stderr
    assert (clone / "log").read_text().split() == ["made", "installed", "compiled-some"]


def test_a_clone_that_was_renamed_is_set_up_anew(clone):
    """Its pip does not start any more, as where Python has no ensurepip, or a Ctrl-C has left half an environment."""
    assert make(clone, "setup").returncode == 0
    renamed = clone.rename(clone.with_name("renamed"))
    done = make(renamed, "lab")
    assert done.returncode == 0, done.stderr
    log = (renamed / "log").read_text().split()
    assert log == ["made", "installed", "compiled-all", "made", "installed", "compiled-some"]


@pytest.mark.parametrize("asked", [["all"], ["lab", "test"]])
def test_a_word_that_set_up_does_not_know_is_refused_with_those_it_does(asked):
    done = subprocess.run(
        [sys.executable, "lab.py", "set-up", *asked], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert f"set-up takes lab or test, not '{' '.join(asked)}'" in done.stderr
    assert "Traceback" not in done.stderr
