"""A real JupyterLab, or Notebook 7, in a real Chromium: for the browser tests and for the README's picture."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import nbformat
from playwright.sync_api import Error, Locator, Page, sync_playwright

from tests.support import prefork
from tests.support.ports import free_ports
from tests.support.programs import CHROMIUM
from tests.support.repository import beside_the_course

LONG_S = 120
"""How long the page may take for anything, on a machine that is busy."""

SCREENSHOTS = Path(__file__).parents[2] / "build" / "screenshots"

CHROMIUM_ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
LATE = "[anywidget] Failed to initialize model"
"""After two seconds, whatever the machine; the live view then tries again."""

UNKNOWN = "Comm not found for comm id"
"""A kernel tells all pages which widgets it closes, also one that was reloaded and has not heard of them: JupyterLab
asks the kernel for its widgets, and on a busy machine some are closed before it is answered."""

QUIET = ("favicon", "/lsp/", "Failed to load resource", LATE, UNKNOWN)

OPEN_INSTEAD = """async notebook => {
    const {commands, serviceManager, shell} = window.jupyterapp;
    for (const widget of [...shell.widgets('main')]) widget.dispose();
    await serviceManager.sessions.shutdownAll();
    await commands.execute('docmanager:open', {path: notebook});
}"""


class Lab:
    """One page, JupyterLab's or Notebook's; `errors` collects what it wrote to its console as errors."""

    opened_s = 0.0
    """Seconds from the page's address to a first notebook whose kernel answers."""

    def __init__(self, page: Page, url: str, token: str, is_lab: bool = True) -> None:
        self.page, self._url, self._token, self._is_lab = page, url, token, is_lab
        self.errors: list[str] = []
        page.on("console", lambda m: self.errors.append(m.text) if m.type == "error" else None)
        page.on("pageerror", lambda error: self.errors.append(str(error)))

    def open(self, notebook: str) -> None:
        """Open a notebook, given relative to the server's folder, and wait for its kernel.

        JupyterLab is loaded for the first only; before another, it closes what is open and shuts its kernels down.
        """
        began = time.monotonic()
        if is_another := self._is_lab and self.opened_s > 0:
            self.page.evaluate(OPEN_INSTEAD, notebook)
        else:
            self._load(f"{self._url}/{'lab/tree' if self._is_lab else 'notebooks'}/{notebook}?token={self._token}")
        self.page.locator(".jp-Notebook .jp-Cell").first.wait_for()
        self.page.locator(".jp-Notebook-ExecutionIndicator[data-status='idle']").first.wait_for()
        if self._is_lab:
            self.page.locator("text=/\\| Idle/").first.wait_for()  # the status bar: the kernel answers
        self.page.wait_for_timeout(500)
        if is_another:
            self.errors.clear()  # of widgets that were still being made as the one before was closed
        self.opened_s = self.opened_s or time.monotonic() - began

    def reload(self) -> None:
        """Reload the page, and wait until the notebook is there again. Its kernel goes on."""
        self.page.reload()
        self.page.locator(".jp-Notebook .jp-Cell").first.wait_for()
        self.page.wait_for_timeout(2000)  # of a kernel that is busy, the page does not know the state
        self.errors.clear()

    def _load(self, address: str) -> None:
        """Go to an address as soon as the server answers."""
        for _ in range(4 * LONG_S):
            try:
                self.page.goto(address)
                return
            except Error:
                time.sleep(0.25)

    def cell(self, index: int) -> Locator:
        """Return the code cell number `index`."""
        return self.page.locator(".jp-Notebook .jp-CodeCell").nth(index)

    def run_cell(self, index: int) -> None:
        """Run one code cell, without waiting for it."""
        prompt = self.cell(index).locator(".jp-InputPrompt")
        before = prompt.inner_text()
        for patience in (100, 200, 400, 800):  # JupyterLab drops keys while it is still setting the notebook up
            prompt.click()
            self.page.keyboard.press("Control+Enter")
            for _ in range(patience):
                if prompt.inner_text() not in (before, "[ ]:"):
                    return
                time.sleep(0.05)
        raise TimeoutError(f"code cell {index} does not run")

    def command(self, name: str, **arguments: object) -> None:
        """Execute one of JupyterLab's own commands."""
        self.page.evaluate(
            "([name, arguments]) => window.jupyterapp.commands.execute(name, arguments)", [name, arguments]
        )

    def wait_for(self, condition: str, argument: object = None) -> None:
        """Wait until a function of JavaScript says true; asked ten times a second, not for each frame."""
        self.page.wait_for_function(condition, arg=argument, polling=100)

    def is_running(self, index: int) -> bool:
        """Return whether a code cell is still running or waiting."""
        return "[*]" in self.cell(index).locator(".jp-InputPrompt").inner_text()

    def wait_until_run(self, index: int, timeout_s: float = LONG_S) -> None:
        """Wait until a code cell has run. Of one whose input is collapsed no number is shown: until nothing runs."""
        deadline = time.monotonic() + timeout_s
        cell, idle = self.cell(index), self.page.locator(".jp-Notebook-ExecutionIndicator[data-status=idle]")
        while time.monotonic() < deadline:
            prompt = cell.locator(".jp-InputPrompt").text_content() or ""
            if re.search(r"\[\d+\]", prompt) or (cell.locator(".jp-InputPlaceholder").count() and idle.count()):
                return
            time.sleep(0.05)
        raise TimeoutError(f"code cell {index} is still running after {timeout_s} s")

    def save(self, file: Path) -> None:
        """Save the notebook, and wait until its file is new."""
        before, deadline = file.stat().st_mtime_ns, time.monotonic() + LONG_S
        self.page.keyboard.press("Escape")
        self.page.keyboard.press("Control+s")
        while file.stat().st_mtime_ns == before:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{file.name} was not saved within {LONG_S} s")
            self.page.wait_for_timeout(50)
        self.page.wait_for_timeout(200)  # until it is written to its end

    def real_errors(self) -> list[str]:
        """Console errors that are not the closed network's."""
        return [error for error in self.errors if not any(word in error for word in QUIET)]


QUIETLY = {
    "settings/@jupyterlab/apputils-extension/notification.jupyterlab-settings": (
        '{"fetchNews": "false", "checkForUpdates": false}'
    ),
    "config/labconfig/page_config.json": '{"buildCheck": false}',  # for which each page has Node.js started twice
}
"""Settings of JupyterLab that asks neither the network nor Node.js for news."""

APPS = {"jupyterlab": "jupyterlab.labapp", "notebook": "notebook.app"}


@contextlib.contextmanager
def lab(folder: Path, width: int = 1280, height: int = 900, app: str = "jupyterlab") -> Iterator[Lab]:
    """Start JupyterLab, or "notebook", over a folder with the course and show it in a browser; stop both afterwards."""
    beside_the_course(folder)
    (port,) = free_ports(1)
    token = secrets.token_hex(16)
    # Not in TMPDIR: Chromium ends where the path of its socket is longer than a socket's may be, some 100 characters.
    keep = tempfile.TemporaryDirectory(prefix="labkit-test-", dir="/tmp")
    state = Path(keep.name)
    for file, settings in QUIETLY.items():
        (state / file).parent.mkdir(parents=True, exist_ok=True)
        (state / file).write_text(settings)
    environment = {
        **os.environ,
        "JUPYTER_RUNTIME_DIR": str(state / "runtime"),
        "JUPYTER_CONFIG_DIR": str(state / "config"),
        "JUPYTERLAB_SETTINGS_DIR": str(state / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(state / "workspaces"),
    }
    arguments = [
        *(
            sys.executable,
            "-c",
            f"import {APPS[app]} as app; app.main()",
            "--no-browser",
            "--ip=127.0.0.1",
            f"--port={port}",
        ),
        *("--ServerApp.port_retries=0", f"--IdentityProvider.token={token}", "--LabApp.news_url=None"),
        "--LabApp.expose_app_in_browser=True",  # for `command`
        *(["--allow-root"] if os.geteuid() == 0 else []),
    ]
    with open(state / "jupyter.log", "w") as log, prefork.in_use():
        server = subprocess.Popen(arguments, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT)
    try:
        with sync_playwright() as playwright:
            chromium = playwright.chromium.launch(
                executable_path=CHROMIUM, args=CHROMIUM_ARGUMENTS, env={**os.environ, "TMPDIR": keep.name}
            )
            page = chromium.new_page(viewport={"width": width, "height": height})
            page.set_default_timeout(1000 * LONG_S)
            yield Lab(page, f"http://127.0.0.1:{port}", token, app == "jupyterlab")
            chromium.close()
    finally:
        server.terminate()
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
        keep.cleanup()


@contextlib.contextmanager
def lab_and_its_end(folder: Path) -> Iterator[Lab]:
    """Do as `lab`, for a test; when it has stopped, JupyterLab, its kernels and their ranks have all ended."""
    from tests.conftest import rank_processes  # here alone: it prepares a process for tests

    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    with lab(folder) as jupyterlab:
        yield jupyterlab
    deadline = time.monotonic() + LONG_S
    while rank_processes() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert rank_processes() == [], "ranks have outlived their kernel"


def write(folder: Path, name: str, *sources: str) -> None:
    """Write a notebook of code cells."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(notebook, folder / name)
