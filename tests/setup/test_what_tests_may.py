"""What `make test` itself insists on: who may start processes, and what is said of tests that did not run."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import LONG_S
from tests.support.tiers import few

ROOT = Path(__file__).parents[2]


TESTS = """
import os, subprocess
import pytest

def test_that_calls():
    subprocess.run(["true"])

def test_that_forks():
    if not os.fork():
        os._exit(0)
    os.wait()

@pytest.mark.spawns
def test_that_may():
    subprocess.run(["true"])

@pytest.mark.browser
def test_of_a_page(page_that_cannot_be):
    pass

@pytest.mark.cluster
@pytest.mark.parametrize("nodes", [1, 2])
def test_of_a_job(nodes, cluster_that_cannot_be):
    pass
"""


@pytest.mark.spawns
@pytest.mark.parametrize("workers", few([["-n", "2"], []], 2), ids=["two workers", "one process"])
def test_who_starts_a_process_has_a_marker_and_the_last_lines_say_what_did_not_run_for_want_of_a_program(
    tmp_path, workers
):
    (tmp_path / "test_these.py").write_text(TESTS)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "true").symlink_to(shutil.which("true"))
    command = f"-m pytest -p tests.conftest -p no:cacheprovider --rootdir={tmp_path} {tmp_path}".split()
    without = {"PATH": str(tmp_path / "bin"), "LABKIT_CHROMIUM": "", "LABKIT_FORBID_SKIPS": ""}
    done = subprocess.run(
        [sys.executable, *command, *workers],
        cwd=ROOT,
        env={**os.environ, **without},
        capture_output=True,
        text=True,
        timeout=5 * LONG_S,
        check=False,
    )
    assert "2 failed, 1 passed, 3 skipped" in done.stdout
    assert "starts processes, but has none of the markers" in done.stdout
    failed = re.findall(r"^FAILED \S+::(\w+)", done.stdout, re.MULTILINE)
    assert set(failed) == {"test_that_calls", "test_that_forks"}
    assert done.stdout.splitlines()[-2:] == [
        "1 test of the browser did not run: apt install chromium",
        "2 tests on SLURM did not run: apt install slurmctld slurmd slurm-client munge",
    ]
