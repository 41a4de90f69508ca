"""What `make lab` opens: a JupyterLab that answers with the first lesson."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest

from tests.conftest import LONG_S
from tests.support.repository import ROOT

LAB = """
import pathlib, sys, lab
lab.BIN = pathlib.Path(sys.prefix) / "bin"  # of the environment that is here: none is set up
sys.exit(lab.jupyter(["--no-browser", "--port=0"]))
"""


def answer(address):
    """What a server says that may have printed its address a moment before it listens."""
    deadline = time.monotonic() + LONG_S
    while True:
        try:
            with urllib.request.urlopen(address) as page:
                return page.status
        except urllib.error.URLError as error:
            if not isinstance(error.reason, ConnectionRefusedError) or time.monotonic() > deadline:
                raise
            time.sleep(0.2)


@pytest.mark.spawns
def test_make_lab_opens_jupyterlab_on_the_first_lesson():
    pytest.importorskip("jupyterlab")
    command = [sys.executable, "-c", LAB]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True}
    server = subprocess.Popen(command, cwd=ROOT, **options)
    try:
        said = (re.search(r"^ *(http://127[^/]+)/([^?]*)(\?token=\w+)", line) for line in server.stdout)
        address, page, token = next(filter(None, said)).groups()
        assert page == "lab/tree/00_start_here.ipynb"
        for path in (page, "api/contents/00_start_here.ipynb"):
            assert answer(f"{address}/{path}{token}") == 200
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.communicate()
