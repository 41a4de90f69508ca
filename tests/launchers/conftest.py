"""Where a launched run's records lie."""

from __future__ import annotations

import pytest

from labkit.launchers.run_directory.directory import RunDirectory
from tests.support.fake_engine import a_job


@pytest.fixture
def directory(tmp_path):
    made = RunDirectory(tmp_path / "run")
    made.create(a_job(), {"launcher": "test"})
    return made
