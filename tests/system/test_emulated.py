"""macOS and Windows, emulated: what a reader sees is word for word what it is on Linux, or it is said what is missing.

Nobody has run labkit on either. What an emulation does not show is said in `site/labkit_emulation.py`.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from labkit.system.macos import MacOS
from labkit.system.windows import Windows
from tests.conftest import LONG_S
from tests.support.repository import ROOT
from tests.support.tiers import few
from tests.system import emulation, tried

pytestmark = [
    pytest.mark.spawns,
    pytest.mark.skipif(sys.platform != "linux", reason="other systems are emulated on Linux"),
]


MISSING = {"darwin": MacOS, "win32": Windows}


@pytest.fixture(scope="module")
def uvlike(tmp_path_factory):
    if not shutil.which("cc"):
        pytest.skip("gloo's other transport is emulated by a C library: there is no cc")
    return emulation.build_uvlike(tmp_path_factory.mktemp("uvlike"))


def run(system, uvlike, *command, timeout_s=10 * LONG_S):
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=emulation.environment(system, uvlike),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    # Those of a kernel that was killed: Windows removes such a file with its last handle.
    for left in Path(tempfile.gettempdir()).glob("labkit-output-*"):
        left.unlink()
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
    return done.stdout


def scenarios(system, uvlike):
    printed = run(system, uvlike, "-m", "tests.system.scenarios")
    (found,) = [line for line in printed.splitlines() if line.startswith("FOUND ")]
    return json.loads(found.removeprefix("FOUND "))


@pytest.fixture(scope="module")
def on_linux(uvlike):
    """With the same transport: what each reports of a rank that has gone is its own."""
    return scenarios("linux", uvlike)


@pytest.mark.wide
@pytest.mark.parametrize("system", emulation.EMULATED)
def test_a_reader_sees_word_for_word_what_linux_shows(system, on_linux, uvlike):
    there = scenarios(system, uvlike)
    assert there == on_linux


@pytest.mark.parametrize("system", few(emulation.EMULATED, 2))
def test_the_tests_that_are_to_be_tried_there_can_be_imported_there(system, monkeypatch):
    """Also what tests themselves ask of the system: for once their modules find the other one, too."""
    monkeypatch.setenv("LABKIT_EMULATE_ALSO", "tests")
    files = sorted({word for command in tried.TRIES.values() for word in command if word.startswith("tests/")})
    assert len(files) > 4
    plain = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--collect-only"]
    assert " tests collected" in run(system, None, *plain, *(file for file in files if "/test_" in file))
    run(system, None, "-c", "import tests.tools.run_notebooks, tests.system.tried, tests.system.scenarios")


SUITES = {
    "engine contract": ["tests/engines/test_engine_contract.py", "-k", "local or (session and not torchrun)"],
    "failures": ["tests/failures/test_failures.py"],
    "hangs": ["tests/failures/test_hangs.py"],
    "Stop": ["tests/monitor/test_stopping.py"],
    "sessions": ["tests/session/test_session.py"],
    "standby": ["tests/engines/test_standby.py"],
    "checkpoints": ["tests/checkpoint/test_checkpoint.py"],
}

OF_THIS_MACHINE = re.compile(r"no \w+ here\b|no file system can be mounted here")
"""Why a test is skipped that would be on Linux, too: SLURM is not installed, say."""

LESSONS = ("00_start_here", "02_from_a_cell_to_ranks", "03_collectives", "06_ddp", "10_compare")


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("suite", SUITES)
@pytest.mark.parametrize("system", emulation.EMULATED)
def test_a_suite_passes_and_what_is_skipped_is_said_in_words(system, suite, uvlike):
    plain = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-rs"]
    said = run(system, uvlike, *plain, *SUITES[suite], timeout_s=3600)
    assert " passed" in said
    known = [text for text in (*MISSING[system].missing.values(), MISSING[system].lacks_posix) if text]
    for line in said.splitlines():
        if line.startswith("SKIPPED"):
            assert any(text in line for text in known) or OF_THIS_MACHINE.search(line), line


@pytest.mark.long
@pytest.mark.kernel
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("lesson", LESSONS)
@pytest.mark.parametrize("system", emulation.EMULATED)
def test_a_lesson_runs_or_says_what_the_system_lacks(system, lesson, uvlike, tmp_path):
    command = ["tests/tools/run_notebooks.py", "--out", str(tmp_path), f"notebooks/{lesson}.ipynb"]
    if MISSING[system].lacks_posix and lesson == "02_from_a_cell_to_ranks":
        with pytest.raises(AssertionError, match="this lesson cannot be used on Windows: .*use WSL2"):
            run(system, uvlike, *command, timeout_s=3600)
    else:
        run(system, uvlike, *command, timeout_s=3600)
