"""One list of dependencies, a README that tells the truth, and a Makefile and CI that fit them."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
import tomllib

import pytest
import yaml
from packaging.requirements import Requirement

import labkit
from tests.conftest import LONG_S
from tests.support import programs
from tests.support.repository import ROOT
from tests.tools.make_coming_from import anchor

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
README = (ROOT / "README.md").read_text()
GUIDE = {page: page.read_text() for page in sorted((ROOT / "notebooks" / "guide").glob("*.md"))}
SET_UP = GUIDE[ROOT / "notebooks" / "guide" / "set_up.md"]
PAGES = {ROOT / "README.md": README, **GUIDE}
"""What a reader of the repository is told, by file."""


def test_conda_takes_python_only_and_the_rest_from_the_one_list():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    *plain, with_pip = environment["dependencies"]
    assert plain == [f"python{PROJECT['requires-python']}", "pip"]
    assert with_pip == {"pip": ["-c .ci/ranges.txt", "-e .[lab]"]}


def test_the_dev_container_makes_the_environment_of_conda_and_uses_it():
    text = (ROOT / ".devcontainer" / "devcontainer.json").read_text()
    container = json.loads(re.sub(r"^\s*//.*$", "", text, flags=re.MULTILINE))
    assert container["postCreateCommand"].endswith("--file environment.yml")
    name = yaml.safe_load((ROOT / "environment.yml").read_text())["name"]
    settings = container["customizations"]["vscode"]["settings"]
    assert settings["python.defaultInterpreterPath"] == f"/opt/conda/envs/{name}/bin/python"


def recorded(name):
    """The versions in a list of constraints, by package."""
    lines = (ROOT / ".ci" / name).read_text().splitlines()
    versions = dict(line.split("==") for line in lines if "==" in line)
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in versions.items()}


def requirements(*extras):
    """What labkit needs with this Python, and what its extras need, without itself."""
    listed = [PROJECT["dependencies"], *(PROJECT["optional-dependencies"][extra] for extra in extras)]
    needed = [Requirement(text) for texts in listed for text in texts]
    return [one for one in needed if one.name != PROJECT["name"] and (one.marker is None or one.marker.evaluate())]


def test_the_constraints_record_a_version_of_every_dependency_that_satisfies_it():
    versions = recorded("constraints.txt")
    for requirement in requirements("lab", "trainers", "site", "test"):
        assert requirement.specifier.contains(versions[requirement.name]), requirement


def ranges():
    """What `make lab` installs within, by package."""
    lines = (ROOT / ".ci" / "ranges.txt").read_text().splitlines()
    return {one.name: one for one in (Requirement(line) for line in lines if not line.startswith("#"))}


def test_a_learner_gets_what_lies_between_the_oldest_and_the_newest_version_that_are_tested():
    oldest, newest = recorded("constraints-oldest.txt"), recorded("constraints.txt")
    assert set(ranges()) == {one.name for one in requirements("lab")}
    for name, allowed in ranges().items():
        floor, cap = sorted(allowed.specifier, key=lambda each: each.operator, reverse=True)
        assert (floor.operator, cap.operator) == (">=", "<")
        assert allowed.specifier.contains(oldest[name])
        assert allowed.specifier.contains(newest[name])
        major, minor, *_ = newest[name].split(".")
        assert cap.version == f"{major}.{int(minor) + 1}", f"{name}: a version that nobody has tried"


def test_the_floors_are_the_oldest_versions_that_are_tested():
    versions = recorded("constraints-oldest.txt")
    for requirement in requirements("lab"):
        (floor,) = requirement.specifier
        assert floor.operator == ">=", "nothing newer is shut out"
        tested = versions[requirement.name].split(".")
        given = floor.version.split(".")
        assert tested[: len(given)] == given, requirement
        assert set(tested[len(given) :]) <= {"0"}, f"{requirement} would also take versions before the one tested"


def test_the_versions_of_python_are_said_alike():
    oldest, *_ = re.findall(r"Python :: (3\.\d+)", " ".join(PROJECT["classifiers"]))
    assert PROJECT["requires-python"] == f">={oldest}"
    assert f"It needs Python {oldest}, " in GUIDE[ROOT / "notebooks" / "guide" / "your_notebook.md"]
    assert f"Python {oldest} or newer" in README
    assert f"Python {oldest} or newer with venv" in SET_UP
    tried = re.search(r"^\* \*\*Another Python\*\*: `[^`]+`(.*?)^\* ", SET_UP, re.MULTILINE | re.DOTALL)
    assert re.findall(r"3\.\d+", tried[1]) == re.findall(r"Python :: (3\.\d+)", " ".join(PROJECT["classifiers"]))


@pytest.mark.spawns
@pytest.mark.check
def test_make_help_and_the_guide_say_the_same_of_what_each_command_took_and_where():
    said = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    machine = re.search(r"measured (on a .*)\.", said)[1]
    assert machine in SET_UP
    for target in ("lab", "test", "check"):
        (took,) = re.findall(rf"^make {target} .*took (\d+ min(?: \d+ s)?)", said, re.MULTILINE)
        assert re.search(rf"^\| .*`make {target}` \| {took} \|", SET_UP, re.MULTILINE), (target, took)


def test_the_tests_with_the_oldest_versions_exist():
    for name in (ROOT / ".ci" / "oldest-tests.txt").read_text().split():
        file, *test = name.split("::")
        assert not test or re.search(rf"^def {test[0].partition('[')[0]}\(", (ROOT / file).read_text(), re.MULTILINE), (
            name
        )
        if file == "tests/lessons/test_notebooks.py":
            assert (ROOT / "notebooks" / f"{test[0].partition('[')[2].rstrip(']')}.ipynb").exists(), name


@pytest.mark.spawns
@pytest.mark.check
def test_the_make_commands_in_the_readme_and_the_guide_exist():
    targets = set(re.findall(r"(?:^|`)make ([a-z][\w-]*)", "\n".join(PAGES.values()), re.MULTILINE))
    done = subprocess.run(["make", "-n", *targets], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings_of_the_repository(page):
    """Those to the web are not followed."""
    for link in set(re.findall(r"\]\(([^)\s:]+)\)", PAGES[page])):
        path, _, heading = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not heading or heading in map(anchor, re.findall(r"^#+ (.*)", target.read_text(), re.MULTILINE)), link


def test_the_readme_is_short_and_leads_to_every_page_of_the_guide():
    assert len(README.split()) <= 800
    assert README.count("![") == 1
    assert README.index("```python") < README.index("![") < README.index("\n## ")
    assert {f"notebooks/guide/{page.name}" for page in GUIDE} == set(re.findall(r"\((notebooks/guide/\w+\.md)", README))


@pytest.mark.spawns
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="this is no clone, and cannot be cloned")
def test_the_readmes_lines_clone_and_install_it(tmp_path):
    """From this repository; pip downloads nothing, and builds with this environment's hatchling."""

    def run(line, **options):
        line = line.replace("ADDRESS", ROOT.as_uri())
        done = subprocess.run(
            ["bash", "-ec", line],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=5 * LONG_S,
            check=False,
            **options,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    clone, make = re.search(r"```sh\n(git clone .*)\n(make \w+)", README).groups()
    assert "lab.py" in run(f"{clone}; {make} -n")
    install = re.search(r"`pip (install git\+\S+)`", README)[1]
    options = f"--quiet --no-deps --no-build-isolation --target {tmp_path / 'installed'}"
    run(f"'{sys.executable}' -m pip {install} {options}", env={**os.environ, "PIP_NO_INDEX": "1"})
    assert (tmp_path / "installed" / "labkit" / "launcher.py").exists()


def test_the_readme_and_the_guide_promise_only_names_that_exist():
    for name in set(re.findall(r"labkit\.(\w+)", "\n".join(PAGES.values()))) - {"log"}:
        assert name in labkit.__all__ or importlib.util.find_spec(f"labkit.{name}"), name


@pytest.mark.spawns
def test_the_readmes_ten_lines_run_as_they_stand(tmp_path):
    example, *_ = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    ast.parse(example)
    script = tmp_path / "example.py"
    script.write_text(example + "\nassert run.status == 'finished' and len(run.history) == 1000\n")
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=5 * LONG_S, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "train: finished · 2 ranks · step 499" in done.stdout


def test_every_public_name_can_be_had_and_is_documented():
    for name in labkit.__all__:
        assert getattr(labkit, name).__doc__, name
    with pytest.raises(AttributeError, match="module 'labkit' has no attribute 'lanch'; it has Checkpoint, Comparison"):
        _ = labkit.lanch


@pytest.mark.spawns
@pytest.mark.check
def test_importing_labkit_costs_a_rank_nothing():
    code = "import sys, labkit; print([m for m in ('torch', 'pandas', 'plotly', 'ipywidgets') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_ci_installs_what_all_tests_need():
    script = (ROOT / ".ci" / "run").read_text()
    for program in programs.NEEDED.values():
        for package in program.install.removeprefix("apt install ").split():
            assert re.search(rf"missing\+=\([^)]*\b{package}\b", script), package
            assert package in SET_UP
