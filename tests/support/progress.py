"""How far the tests are and how long the rest will take: one line, rewritten in place on a terminal.

Where nobody looks (a log file), a line at every twentieth of the tests. `-v` and `-q` are left to pytest.

`python -m tests.support.progress` writes what the last run took into seconds.json, for machines on which there was
none.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

CACHE = "labkit/durations"
"""Where the seconds that each test took are kept for the next run, in pytest's cache."""

FILE = Path(__file__).parent / "seconds.json"
FILE_S: dict[str, float] = json.loads(FILE.read_text())
"""What all tests of a file took on two cores."""

LINES = 20
"""How many lines there are where stdout is no terminal."""


class Progress:
    """What is left is estimated from the last run's seconds where they are known; from those of the file otherwise, or
    from the mean."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._cache = getattr(config, "cache", None)  # pytest may run without
        self._known: dict[str, float] = self._cache.get(CACHE, {}) if self._cache else {}
        self._took: dict[str, float] = {}
        self._ids: list[str] = []
        self._done = 0
        self._lines = 0
        self._shown = False
        self._workers = 1

    @property
    def _reporter(self):
        return self._config.pluginmanager.get_plugin("terminalreporter")

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._begin([item.nodeid for item in session.items])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        """Take the tests from pytest-xdist's workers; each finds them all, and does some."""
        self._workers = self._config.option.numprocesses
        self._begin(list(ids))

    def _begin(self, ids: list[str]) -> None:
        self._ids = ids
        known = {**_expected(ids), **self._known}
        self._known = {name: known[name] for name in ids if name in known}
        if self._config.option.verbose == 0 and not self._config.option.collectonly and self._reporter is not None:
            self._shown = True
            self._reporter.showfspath = False

    @pytest.hookimpl(wrapper=True)
    def pytest_report_teststatus(self):
        """In the place of a letter for each test there is the line."""
        category, letter, word = yield
        return (category, "", "") if self._shown else (category, letter, word)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._took[report.nodeid] = self._took.get(report.nodeid, 0.0) + report.duration
        if self._shown and report.failed:
            self._write(f"{report.outcome.upper()} {report.nodeid}", stays=True)

    def pytest_runtest_logfinish(self) -> None:
        self._done += 1  # here, one by one: reports of several workers come in between
        if not self._shown:
            return
        if self._reporter.isatty:
            self._write(self.line(), stays=False)
        elif (due := LINES * self._done // len(self._ids)) > self._lines:
            self._lines = due
            self._write(self.line(), stays=True)

    def pytest_sessionfinish(self) -> None:
        if self._shown and self._reporter.isatty:
            self._reporter.rewrite("", erase=True)
        self._shown = False  # the summary has words again
        if self._cache and self._took:
            self._cache.set(CACHE, self._cache.get(CACHE, {}) | self._took)

    def line(self) -> str:
        """Say how many tests are done, and how long the others will take."""
        done, all_ = self._done, len(self._ids)
        left_s = self.left_s() / self._workers
        left = f"{left_s:.0f} s" if left_s < 90 else f"{left_s / 60:.0f} min"
        return f"[{100 * done // max(1, all_):3d} %] {done} of {all_}" + (
            f" · about {left} left" if done < all_ else ""
        )

    def left_s(self) -> float:
        """Return the seconds that the other tests will take: as in the last run, if this one is as quick as that was.

        Reckoned by file, for a file's first tests may all be short.
        """
        before_s, now_s, tests_left = Counter[str](), Counter[str](), Counter(map(_file, self._ids))
        for name, seconds in self._known.items():
            before_s[_file(name)] += seconds
        for name, seconds in self._took.items():
            now_s[_file(name)] += seconds
            tests_left[_file(name)] -= 1
        done = [file for file in before_s if not tests_left[file]]
        done_before_s, done_now_s = sum(before_s[file] for file in done), sum(now_s[file] for file in done)
        pace = done_now_s / done_before_s if done_before_s > 10 else 1.0  # a few seconds tell nothing
        going_s = sum(max(0.0, pace * before_s[file] - now_s[file]) for file in before_s if tests_left[file])
        new = [name for name in self._ids if name not in self._known and name not in self._took]
        seen = len(self._known.keys() | self._took.keys())
        return going_s + (len(new) * (going_s + now_s.total()) / seen if seen else 0.0)

    def _write(self, line: str, stays: bool) -> None:
        if self._reporter.isatty:
            self._reporter.rewrite(line + ("\n" if stays else ""), erase=True)
        else:
            self._reporter.write_line(line)


def _file(name: str) -> str:
    return name.partition("::")[0].rpartition("/")[2]


def _expected(ids: list[str]) -> dict[str, float]:
    """Return seconds for each test of a file whose seconds are known: as if all of them took the same."""
    count = Counter(map(_file, ids))
    return {name: FILE_S[_file(name)] / count[_file(name)] for name in ids if _file(name) in FILE_S}


def main() -> None:
    """Write the seconds of each file, as the last run has left them in pytest's cache."""
    took: Counter[str] = Counter()
    for name, seconds in json.loads(Path(".pytest_cache/v", CACHE).read_text()).items():
        took[_file(name)] += seconds
    FILE.write_text(json.dumps({name: round(took[name], 1) for name in sorted(took)}, indent=1) + "\n")


if __name__ == "__main__":
    main()
