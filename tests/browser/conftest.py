"""One JupyterLab for the tests of a file."""

from __future__ import annotations

import shutil

import pytest

from tests.support.browser import lab_and_its_end
from tests.tools.run_notebooks import FOLDER


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """JupyterLab over a folder with the lessons."""
    folder = tmp_path_factory.mktemp("lab")
    for lesson in FOLDER.glob("*.ipynb"):
        shutil.copy(lesson, folder)
    with lab_and_its_end(folder) as jupyterlab:
        jupyterlab.folder = folder
        yield jupyterlab
