"""What `make test` itself says and insists on: how far it is, how long it will take, and who may start processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.conftest import LONG_S
from tests.support import progress as module
from tests.support.progress import CACHE, Progress

ROOT = Path(__file__).parents[2]


class Cache(dict):
    def set(self, key, value):
        self[key] = value


def progress(names, known=None):
    """Nobody looks at it: it only counts."""
    config = SimpleNamespace(cache=Cache({CACHE: known or {}}), option=SimpleNamespace(verbose=-1, collectonly=False))
    config.pluginmanager = SimpleNamespace(get_plugin=lambda name: None)
    made = Progress(config)
    made.pytest_collection_finish(SimpleNamespace(items=[SimpleNamespace(nodeid=name) for name in names]))
    return made


def took(made, name, *seconds):
    for phase_s in seconds:
        made.pytest_runtest_logreport(SimpleNamespace(nodeid=name, duration=phase_s, failed=False))
    made.pytest_runtest_logfinish()


def test_what_is_left_is_what_it_took_the_last_time_and_the_mean_for_what_is_new():
    made = progress("abcd", {"a": 20.0, "b": 60.0, "c": 200.0})
    assert made.left_s() == pytest.approx(280 + 280 / 3)
    took(made, "a", 1.0, 18.0, 1.0)
    assert made.line() == "[ 25 %] 1 of 4 · about 6 min left"
    took(made, "b", 60.0)
    took(made, "d", 3.0)
    assert made.left_s() == pytest.approx(200)
    took(made, "c", 100.0)
    assert made.line() == "[100 %] 4 of 4"
    made.pytest_sessionfinish()
    assert made._config.cache[CACHE] == {"a": 20.0, "b": 60.0, "c": 100.0, "d": 3.0}, "for the next time"


def test_on_a_machine_that_is_twice_as_slow_as_the_last_time_twice_as_much_is_left():
    made = progress("abc", {"a": 20.0, "b": 5.0})
    took(made, "a", 40.0)
    assert made.left_s() == pytest.approx(10 + (40 + 10) / 2)


def test_with_nothing_known_the_mean_of_this_run_is_taken():
    made = progress("abc")
    assert made.left_s() == 0
    took(made, "a", 4.0)
    assert made.line() == "[ 33 %] 1 of 3 · about 8 s left"


def test_on_a_machine_without_a_last_time_each_test_takes_its_part_of_the_files_seconds(monkeypatch):
    monkeypatch.setattr(module, "FILE_S", {"test_long.py": 80.0, "test_short.py": 2.0})
    names = [
        "tests/test_long.py::one[a/b]",
        "tests/test_long.py::two",
        "tests/test_short.py::one",
        "tests/test_new.py::one",
    ]
    made = progress(names, {names[0]: 70.0})
    assert made.left_s() == pytest.approx(70 + 40 + 2 + (70 + 40 + 2) / 3)
    took(made, names[2], 2.0)
    assert made.line() == "[ 25 %] 1 of 4 · about 2 min left"
    made.pytest_sessionfinish()
    assert made._config.cache[CACHE] == {names[0]: 70.0, names[2]: 2.0}, "what was measured"


def test_a_file_that_begins_with_short_tests_takes_no_less(monkeypatch):
    monkeypatch.setattr(module, "FILE_S", {"test_long.py": 300.0})
    made = progress([f"tests/test_long.py::{n}" for n in range(4)])
    for n in range(3):
        took(made, f"tests/test_long.py::{n}", 1.0)
    assert made.left_s() == pytest.approx(297)


def test_workers_share_what_is_left():
    made = progress("abc", {"a": 20.0, "b": 6.0, "c": 6.0})
    made._config.option.numprocesses = 3
    made.pytest_xdist_node_collection_finished(ids=list("abc"))
    took(made, "a", 20.0)
    assert made.line() == "[ 33 %] 1 of 3 · about 4 s left"


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
@pytest.mark.parametrize("workers", [[], ["-n", "2"]], ids=["one process", "two workers"])
def test_a_test_that_starts_a_process_has_a_marker_and_a_log_has_a_line_now_and_then(tmp_path, workers):
    shown = pytest_on(
        tmp_path,
        """
        import os, subprocess
        import pytest

        @pytest.mark.parametrize("n", range(97))
        def test_of_itself(n):
            pass

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
        *workers,
    )
    lines = shown.splitlines()
    assert "2 failed, 98 passed" in lines[-1], "pytest's own last line"
    assert "starts processes, but has none of the markers" in shown
    failed = [line.split(" - ")[0] for line in lines if line.startswith("FAILED")]  # under CI pytest adds the reason
    assert {line.split("::")[1] for line in failed} == {
        "test_that_calls",
        "test_that_forks",
    }
    shown = [line for line in lines if re.match(r"\[ *\d+ %\]", line)]
    assert re.fullmatch(r"\[  5 %\] 5 of 100 · about \d+ s left", shown[0])
    assert shown[-1] == "[100 %] 100 of 100"
    assert len(shown) == 20


@pytest.mark.spawns
def test_the_list_of_fonts_which_takes_a_process_is_there_before_the_first_test(tmp_path):
    """Also for a user who has none yet, as on a fresh machine."""
    home = tmp_path / "home"
    home.mkdir()
    test = """
        def test_of_a_picture():
            import matplotlib.font_manager
    """
    places = {"HOME": str(home), "MPLCONFIGDIR": "", "XDG_CACHE_HOME": "", "XDG_CONFIG_HOME": ""}
    assert "1 passed" in pytest_on(tmp_path, test, **places)
    assert list(home.glob("**/fontlist-*.json")), "the home was used"


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
@pytest.mark.parametrize("workers", [[], ["-n", "2"]], ids=["one process", "two workers"])
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
