"""What is installed: the wheel, what it brings along, what it leaves as it is, and under which name."""

from __future__ import annotations

import email
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import hatchling
import pytest
from packaging.requirements import Requirement

from tests.conftest import LONG_S
from tests.support.repository import ROOT, tracked
from tests.support.tiers import few

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
HOSTED = sorted((ROOT / "tests" / "hosted").glob("*.txt"))

LAUNCH = """
import labkit

def train(worker):
    worker.log(loss=1.0)
    return labkit.__file__

if __name__ == "__main__":
    run = labkit.launch(train, world_size=2, live=False)
    assert run.status == "finished" and len(run.history) == 2
    print(*run.results)
"""

NO_OTHER_COPY = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "__editable__" not in getattr(finder, "__module__", "")]
"""
"""An editable install would quietly give back, from the tree where it lies, what is not installed."""


def run(*command, **options):
    done = subprocess.run(
        [*map(str, command)], capture_output=True, text=True, timeout=5 * LONG_S, check=False, **options
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


BUILT_FROM = ("labkit", "pyproject.toml", "README.md", "LICENSE")


def copy_of(names, folder):
    """Copy files of the repository, with their modes, and return the folder."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    return folder


def pip_of(folder):
    """Make an environment, and return the command of this one's pip for it, which builds with this one's hatchling."""
    venv.create(folder, with_pip=False)
    pip = run(sys.executable, "-m", "pip", "--version").split(" from ")[1].split(" (python")[0]
    return folder / "bin" / "python", pip


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder with the source distribution, and the wheel that was built from it; of what git knows."""
    source, made = copy_of(tracked(*BUILT_FROM), tmp_path_factory.mktemp("source")), tmp_path_factory.mktemp("made")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", made, source)
    return made


@pytest.fixture(scope="module")
def wheel(built):
    (wheel,) = built.glob("*.whl")
    return wheel


@pytest.mark.spawns
def test_the_wheel_has_every_module_and_all_data_and_nothing_else(built, wheel):
    with zipfile.ZipFile(wheel) as file:
        names = {name for name in file.namelist() if ".dist-info/" not in name}
        (metadata,) = [file.read(n).decode() for n in file.namelist() if n.endswith(".dist-info/METADATA")]
        assert any(name.endswith("licenses/LICENSE") for name in file.namelist())
    assert names == set(tracked("labkit"))
    assert "labkit/py.typed" in names
    assert not [name for name in names if "course" in name]
    assert email.message_from_string(metadata)["Name"] == PROJECT["name"]
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        sources = {name.partition("/")[2] for name in file.getnames()}
    assert names | {"pyproject.toml", "README.md", "LICENSE"} <= sources


@pytest.mark.spawns
def test_the_wheel_launches_from_where_it_was_installed(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as file:
        file.extractall(tmp_path / "installed")
    (tmp_path / "installed" / "sitecustomize.py").write_text(NO_OTHER_COPY)
    (tmp_path / "train.py").write_text(LAUNCH)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "installed")}
    shown = run(sys.executable, "train.py", cwd=tmp_path, env=environment)
    assert shown.count(str(tmp_path / "installed" / "labkit" / "__init__.py")) == 2


OFFLINE = ("--quiet", "--disable-pip-version-check", "--no-deps", "--no-build-isolation")
"""Options of pip: nothing is downloaded, and hatchling is the one that is here."""

WITH_HATCHLING = {**os.environ, "PYTHONPATH": str(Path(hatchling.__file__).parents[1])}


@pytest.mark.spawns
def test_labkit_is_found_also_in_the_folder_that_holds_a_clone_called_labkit(tmp_path):
    """The clone is a folder without __init__.py: Python takes such a one for a package where it finds no other."""
    clone = copy_of(tracked(*BUILT_FROM), tmp_path / "labkit")
    pip = pip_of(tmp_path / "venv")
    run(*pip, "install", *OFFLINE, "--editable", clone, env=WITH_HATCHLING)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    for folder in (tmp_path, clone, clone / "notebooks"):
        folder.mkdir(exist_ok=True)
        found = run(pip[0], "-c", "import labkit; print(labkit.__file__)", cwd=folder, env=environment)
        assert found.strip() == str(clone / "labkit" / "__init__.py"), folder


@pytest.mark.spawns
@pytest.mark.parametrize("hosted", few(HOSTED, 3), ids=lambda path: path.stem)
def test_in_a_hosted_notebook_pip_installs_labkit_and_nothing_else(hosted, wheel, tmp_path):
    """pip itself is asked, where what a hosted notebook has seems to be installed."""
    pip = pip_of(tmp_path / "venv")
    (packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    for name, version in pins(hosted).items():
        info = packages / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    said = run(
        *(*pip, "install", "--dry-run", "--no-index"),
        *("--disable-pip-version-check", "--ignore-requires-python", wheel),
    )
    (would,) = [line for line in said.splitlines() if line.startswith("Would install")]
    assert would == f"Would install {PROJECT['name']}-{PROJECT['version']}"


@pytest.mark.parametrize("hosted", HOSTED, ids=lambda path: path.stem)
def test_a_hosted_notebook_has_all_that_a_launch_needs(hosted):
    assert re.search(r"20\d\d-\d\d-\d\d.*commit [0-9a-f]{12}", hosted.read_text(), re.DOTALL), "its date and source"
    there = pins(hosted)
    assert Requirement(f"python{PROJECT['requires-python']}").specifier.contains(there["python"])
    for requirement in map(Requirement, PROJECT["dependencies"]):
        assert requirement.specifier.contains(there[requirement.name]), requirement


def pins(path):
    return dict(line.split("==") for line in path.read_text().splitlines() if "==" in line)


@pytest.mark.spawns
def test_nobody_is_sent_to_the_other_labkit():
    """It is on the package index since 2015; `pip install labkit` would bring it."""
    sends = re.compile(
        r"\b(?:pip|uv|conda|mamba|poetry)3? (?:pip )?(?:install|add) [^\n|;&]*?(?<![\w/.-])labkit(?![\w/-])"
    )
    assert sends.search("try: pip install -q labkit")
    assert not sends.search("git clone … && pip install ./labkit")
    for name in tracked():
        text = (ROOT / name).read_bytes().decode(errors="ignore")
        if Path(name).name != Path(__file__).name:
            assert not sends.search(text), name
