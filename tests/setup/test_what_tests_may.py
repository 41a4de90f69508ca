"""What `make test` itself insists on: who may start processes, and what is said of tests that did not run."""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.conftest import LONG_S
from tests.support.tiers import few

ROOT = Path(__file__).parents[2]


def pytest_on(folder, test, *options, **environment):
    """Run pytest as `make test` does on one file, and give what it shows."""
    (folder / "test_these.py").write_text(textwrap.dedent(test))
    command = f"-m pytest -p tests.conftest -p no:cacheprovider --rootdir={folder} {folder}".split()
    done = subprocess.run(
        [sys.executable, *command, *options],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=5 * LONG_S,
        check=False,
    )
    return done.stdout


@pytest.mark.spawns
def test_a_test_that_starts_a_process_has_a_marker(tmp_path):
    shown = pytest_on(
        tmp_path,
        """
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
    """,
    )
    assert "2 failed, 1 passed" in shown
    assert "starts processes, but has none of the markers" in shown
    failed = re.findall(r"^FAILED \S+::(\w+)", shown, re.MULTILINE)
    assert set(failed) == {"test_that_calls", "test_that_forks"}


WITH_PROGRAMS = """
    import pytest

    @pytest.mark.browser
    def test_of_a_page(page_that_cannot_be):
        pass

    @pytest.mark.cluster
    @pytest.mark.parametrize("nodes", [1, 2])
    def test_of_a_job(nodes, cluster_that_cannot_be):
        pass

    def test_of_neither():
        pass
"""


@pytest.mark.spawns
@pytest.mark.parametrize("workers", few([["-n", "2"], []], 2), ids=["two workers", "one process"])
def test_without_chromium_and_slurm_their_tests_are_skipped_and_the_last_lines_say_how_many(tmp_path, workers):
    nothing = tmp_path / "bin"
    nothing.mkdir()
    without = {"PATH": str(nothing), "LABKIT_CHROMIUM": "", "LABKIT_FORBID_SKIPS": ""}
    shown = pytest_on(tmp_path, WITH_PROGRAMS, *workers, **without)
    assert "1 passed, 3 skipped" in shown
    assert shown.splitlines()[-2:] == [
        "1 test of the browser did not run: apt install chromium",
        "2 tests on SLURM did not run: apt install slurmctld slurmd slurm-client munge",
    ]
