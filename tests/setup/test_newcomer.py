"""The guide's set-up, word for word, by an ordinary user with an empty home and no network: a clone called labkit,
an archive without .git, and a course folder that the reader cannot write to.

pip downloads nothing: modules are those that are installed here (tests/support/newcomer.py), so that packages which pip
would fetch broken, or not at all, are not noticed. `make test-long` downloads them all.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from tests.conftest import LONG_S, wait_until
from tests.support.newcomer import AS_ROOT, UID, Newcomer, copy_repository, write_wheels
from tests.support.repository import ROOT

READER = UID + 1

SET_UP_S = 1800
"""How long a set-up may take, where everything is downloaded."""

pytestmark = [
    pytest.mark.spawns,
    pytest.mark.wide,
    pytest.mark.cold,  # nothing of the tests is in these processes
    pytest.mark.timeout(2 * SET_UP_S),
    pytest.mark.skipif(sys.platform != "linux", reason="users and networks are Linux's"),
]

SET_UP = (ROOT / "notebooks" / "guide" / "set_up.md").read_text()
COMMANDS = re.search(r"```sh\n(make lab .*?)```", SET_UP, re.DOTALL)
MAKE_LAB, MAKE_TEST, MAKE_CHECK = (line.partition("#")[0].strip() for line in COMMANDS[1].splitlines())
NO_BROWSER = re.search(r"`(make lab LAB_OPTIONS=.*?)`", SET_UP)[1]
JUPYTER_LAB = "jupyter lab notebooks/00_start_here.ipynb"

OPEN = """
import os, re, signal, subprocess, sys, time, urllib.error, urllib.request

options = {"shell": True, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
command = subprocess.Popen(sys.argv[1], start_new_session=True, **options)
said = []
for line in command.stdout:
    said.append(line)
    if found := re.search(sys.argv[2] + "(http://[^/]+)/([^?]*)[?](token=[0-9a-f]+)", line):
        break
else:
    sys.exit("".join(said))
try:
    server, page, token = found.groups()
    assert page == "lab/tree/00_start_here.ipynb", page
    for path in (page, "api/contents/00_start_here.ipynb"):
        for left in reversed(range(100)):  # the address is printed a moment before the server listens
            try:
                with urllib.request.urlopen(f"{server}/{path}?{token}") as answer:
                    assert answer.status == 200, path
                break
            except urllib.error.URLError as error:
                if not left or not isinstance(error.reason, ConnectionRefusedError):
                    raise
                time.sleep(0.2)
finally:
    os.killpg(command.pid, signal.SIGTERM)
    command.stdout.read()
    command.wait()
print("opened")
"""
"""Runs a command until the JupyterLab that it starts has answered with the first lesson."""

BROWSER = """\
#!/usr/bin/env python3
import sys, urllib.request
print(urllib.request.urlopen(sys.argv[1]).read().decode(), flush=True)
"""
"""Shows what it is to open: a page of Jupyter's that leads to its server."""

TRAIN = """
import labkit

def train(worker):
    worker.log(loss=1.0)
    return labkit.__file__

if __name__ == "__main__":
    run = labkit.launch(train, world_size=2, live=False)
    assert run.status == "finished" and len(run.history) == 2
    print(*{labkit.__file__, *run.results})
"""


class Course(NamedTuple):
    """A copy of the repository, and who set it up."""

    folder: Path
    newcomer: Newcomer

    @property
    def python(self) -> str:
        return f"{self.folder.name}/.venv/bin/python"


@pytest.fixture(scope="module")
def place():
    """A folder that every user can look into; the tests' own are closed to others."""
    made = Path(tempfile.mkdtemp(prefix="newcomer-", dir="/tmp"))
    made.chmod(0o755)
    yield made
    for path in made.rglob("*"):
        if path.is_dir() and not path.is_symlink():
            path.chmod(0o755)
    shutil.rmtree(made)


@pytest.fixture(scope="module")
def wheels(place):
    return write_wheels(place / "wheels")


@pytest.fixture(scope="module", params=["clone", "archive"])
def course(request, place, wheels):
    """Set up by the guide's first command, in a home of its own."""
    holds = place / request.param
    holds.mkdir()
    newcomer = Newcomer(holds, wheels)
    made = Course(set_up(holds, newcomer, is_clone=request.param == "clone"), newcomer)
    yield made
    if AS_ROOT:
        try:
            wait_until(lambda: not processes_of(UID, READER))
        finally:
            for process in processes_of(UID, READER):
                process.kill()


def processes_of(*uids):
    """The processes of these users that have not ended."""
    asked = psutil.process_iter(["uids", "status"])
    return [p for p in asked if p.info["uids"].real in uids and p.info["status"] != psutil.STATUS_ZOMBIE]


def set_up(holds, newcomer, *, is_clone, network=False):
    folder = copy_repository(holds / "labkit", is_clone=is_clone)
    newcomer.own(folder)
    (holds / "open.py").write_text(OPEN)
    (holds / "train.py").write_text(TRAIN)
    (holds / "browser").write_text(BROWSER)
    (holds / "browser").chmod(0o755)
    open_lesson(MAKE_LAB, folder, newcomer, network=network)
    return folder


def open_lesson(command, folder, newcomer, *, network=False, **settings):
    """Check that a command opens the first lesson, in the browser unless there shall be none."""
    before_the_address = "^ *" if "LAB_OPTIONS" in command else "url="
    line = shlex.join(["python3", "../open.py", command, before_the_address])
    settings |= {"BROWSER": str(folder.parent / "browser")}
    assert newcomer.run(line, folder, timeout_s=SET_UP_S, network=network, **settings).endswith("opened\n")


def works(course, reader):
    """Import, launch, and the first lesson, in the folder that holds the course's."""
    holds = course.folder.parent
    found = reader.run(f"{course.python} train.py", holds, timeout_s=5 * LONG_S).split()
    assert found == [str(course.folder / "labkit" / "__init__.py")]
    found = reader.run(
        f"{course.python} -c 'import labkit; print(labkit.launch.__name__)'", holds, timeout_s=5 * LONG_S
    )
    assert found == "launch\n"
    executed = reader.home / "00.ipynb"
    lesson = f"notebooks/00_start_here.ipynb '{executed}' --cwd notebooks"
    reader.run(f".venv/bin/papermill {lesson} --no-progress-bar", course.folder, timeout_s=5 * LONG_S)
    assert all(cell["execution_count"] for cell in json.loads(executed.read_text())["cells"] if "outputs" in cell)


def test_after_make_lab_labkit_launches_and_the_first_lesson_runs(course):
    works(course, course.newcomer)


def test_make_test_passes_what_asks_for_the_repositorys_files_with_and_without_git(course):
    chosen = "tests/setup/test_environment.py tests/setup/test_packaging.py"
    chosen += " -k 'not wheel and not pip and not labkit_is_found and not clone_and_install'"
    said = course.newcomer.run(MAKE_TEST, course.folder, timeout_s=SET_UP_S, WORKERS="0", PYTEST_OPTIONS=chosen)
    assert re.search(r"=== \d+ passed, \d+ deselected in ", said)


@pytest.mark.parametrize("course", ["archive"], indirect=True)
def test_jupyter_opens_the_lessons_as_after_conda_or_pip(course):
    assert f"`{JUPYTER_LAB}`" in SET_UP
    open_lesson(f"PATH=$PWD/.venv/bin:$PATH {JUPYTER_LAB}", course.folder, course.newcomer)


@pytest.mark.parametrize("course", ["clone"], indirect=True)
def test_a_reader_who_cannot_write_to_the_course_opens_and_runs_it(course):
    """As at a university: a teacher has set it up."""
    reader = Newcomer(course.folder.parent, None, READER)
    modes = {path: path.stat().st_mode for path in [course.folder, *course.folder.rglob("*")] if not path.is_symlink()}
    for path, mode in modes.items():
        path.chmod(mode & ~0o222)
    try:
        with pytest.raises(AssertionError, match="Permission denied"):
            reader.run("touch notebooks/file", course.folder, timeout_s=5 * LONG_S)
        open_lesson(NO_BROWSER, course.folder, reader)
        works(course, reader)
    finally:
        for path, mode in modes.items():
            path.chmod(mode)


@pytest.mark.long
def test_what_is_downloaded_is_all_that_is_needed(place):
    """With the network for the set-up, and without it for everything after; `make check` whole, from an archive."""
    holds = place / "downloaded"
    holds.mkdir()
    newcomer = Newcomer(holds, None)
    course = Course(set_up(holds, newcomer, is_clone=False, network=True), newcomer)
    works(course, newcomer)
    assert re.search(r"\d+ passed", newcomer.run(MAKE_CHECK, course.folder, timeout_s=SET_UP_S))
