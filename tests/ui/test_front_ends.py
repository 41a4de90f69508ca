"""The guide's table of front ends, row by row: what each shows of a run, and how it is stopped there.

Real are nbclient, a terminal's IPython and plain Python; JupyterLab 4 and Notebook 7 are in `test_browser.py` and
`test_browser_notebook.py`. VS Code and Colab are emulated: cells are sent to a real kernel as they send them, in their
environment. Each says where it is known from what they send, and when that was read. Kaggle asks for the same as Colab,
and is told by its environment.
"""

from __future__ import annotations

import os
import signal
import sys
from types import SimpleNamespace

import nbclient
import nbformat
import pytest

import labkit
from labkit.ui import charts, kernel
from tests.conftest import LONG_S
from tests.support.repository import beside_the_course
from tests.support.tiers import few
from tests.ui.test_kernel import PLOTLY, SPIN, Notebook, drawn_since, statuses

COLAB = {"COLAB_RELEASE_TAG": "release-colab-external_20260406-060047_RC00"}
"""colabtools' _serverextension/_handlers.py at 3c07d776a9d3, 2026-04-07."""

OUTPUT = '''
"""As much of google.colab.output as anywidget asks for (colabtools' output/_widgets.py at 3c07d776a9d3)."""

enabled = 0

def enable_custom_widget_manager():
    global enabled
    enabled += 1
'''


PACKAGES = {
    "torch_xla/__init__.py": "",
    "google/__init__.py": "",
    "google/colab/__init__.py": "",
    "google/colab/output.py": OUTPUT,
}
"""What a notebook of Colab's has."""


# VS Code, Colab: emulated


@pytest.fixture(scope="module")
def notebook(tmp_path_factory):
    notebook = Notebook(tmp_path_factory.mktemp("kernel"))
    notebook.run(SPIN)
    yield notebook
    notebook.close()


SENT = {
    "JupyterLab": lambda cell: {"cellId": cell},
    # The address of the cell's document, and the cell's own metadata: vscode-jupyter's cellExecution.ts at
    # 00593cb90954, read on 2026-11-22.
    "VS Code": lambda cell: {"cellId": f"vscode-notebook-cell:/home/me/a.ipynb#{cell}", "collapsed": False},
    # colabtools' _history.py at 3c07d776a9d3, 2026-04-07.
    "Colab": lambda cell: {"colab": {"cell_id": cell}},
}


@pytest.mark.kernel
@pytest.mark.parametrize("front_end", SENT)
def test_a_cell_is_known_by_what_the_front_end_says_of_it(notebook, front_end):
    """Run again, edited, it stops what it had launched; another cell with the same text does not."""
    sent = SENT[front_end]
    launch = "run_{} = labkit.launch(spin, world_size=1, wait=False)".format
    notebook.run(launch(1), metadata=sent("one"))
    notebook.run("kept = run_1\n" + launch(1), metadata=sent("two"))
    assert statuses(notebook, "kept", "run_1") == ["running", "running"]
    notebook.run(launch(3), metadata=sent("two"))
    assert statuses(notebook, "kept", "run_1", "run_3") == ["running", "stopped", "running"]
    notebook.run("for run in (kept, run_3): run.stop()")


@pytest.mark.kernel
def test_the_stop_button_says_whether_a_click_would_be_heard(notebook):
    """A kernel may have subshells and the front end none, as any but JupyterLab and Notebook: then nobody hears it."""
    if not notebook.value("labkit.ui.kernel.has_subshells()"):
        pytest.skip("this kernel has no subshells: test_the_stop_button_works_while_its_cell_is_waiting")
    notebook.run("labkit.ui.view.SUBSHELL_S = 0.5")
    cell = notebook.start("run = labkit.launch(spin)", watched=True)
    notebook.listen_until(lambda: notebook.view["button"] == "use kernel ■")
    assert any(shown["button"] == "Stop" for shown in notebook.told), "first"
    assert "a front end that uses them" in notebook.view["hint"]
    subshell = notebook.open_subshell()  # late, as by a browser that was slow
    notebook.listen_until(lambda: notebook.view["button"] == "Stop")
    notebook.close_subshell(subshell)
    notebook.interrupt()
    notebook.finish(cell)
    assert (cell.error["ename"], notebook.value("labkit.runs[-1].status")) == ("RunInterrupted", "stopped")


@pytest.mark.parametrize(
    ("can_type", "missing", "expected"),
    [(True, "", True), (False, "", False), (True, "ipywidgets", False), (True, "anywidget", False)],
)
def test_a_person_watches_where_a_cell_may_ask_and_there_are_widgets(can_type, missing, expected, monkeypatch):
    """Elsewhere a run is shown as in a headless notebook."""
    monkeypatch.setattr(kernel, "has_kernel", lambda: True)
    monkeypatch.setattr(kernel, "shell", lambda: SimpleNamespace(kernel=SimpleNamespace(_allow_stdin=can_type)))
    monkeypatch.setitem(sys.modules, missing, None)
    assert kernel.is_interactive() == expected


@pytest.fixture
def hosted(notebook, tmp_path):
    """The kernel in Colab's environment, without subshells, which it has not."""
    for path, text in PACKAGES.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    notebook.run(f"""
        import sys
        from labkit.ui import kernel
        before, subshells = dict(os.environ), kernel.has_subshells
        os.environ.update({COLAB!r})
        sys.path.insert(0, {str(tmp_path)!r})
        kernel.has_subshells = lambda: False
        import google.colab.output as output
    """)
    yield notebook
    notebook.run("""
        os.environ.clear()
        os.environ.update(before)
        del sys.path[0]
        kernel.has_subshells = subshells
    """)


@pytest.mark.kernel
def test_in_a_hosted_notebook_a_run_is_shown_live_stopped_and_kept_as_html(hosted):
    before = set(hosted.views)
    cell = hosted.start("run = labkit.launch(spin)", watched=True)
    hosted.listen_until(lambda: drawn_since(hosted, before))
    shown = [shown for shown in hosted.told if shown["name"] == "spin"][-1]
    assert shown["button"] == "use kernel ■"
    hosted.interrupt()
    hosted.finish(cell)
    hosted.listen_until(cell.charts)
    assert cell.error["ename"] == "RunInterrupted"
    assert "spin: stopped" in cell.html
    assert set(cell.charts()[0]) == {PLOTLY, "text/html", "text/plain"}, "whichever the page can draw"
    again = hosted.run("labkit.launch(lambda worker: print(worker.device))")
    assert "[rank 1] cpu" in again.stdout
    assert hosted.value("output.enabled") == 1, "or Colab draws no live chart"


@pytest.mark.parametrize(("name", "is_html"), [("COLAB_RELEASE_TAG", True), ("KAGGLE_URL_BASE", True), ("", False)])
def test_a_chart_is_html_where_the_page_may_not_draw_plotlys_data(name, is_html, monkeypatch):
    for each in ("COLAB_RELEASE_TAG", "KAGGLE_URL_BASE"):
        monkeypatch.delenv(each, raising=False)
    if name:
        monkeypatch.setenv(name, "x")
    bundle = labkit.charts.bars(["a"], [1.0], "s")._repr_mimebundle_()
    assert ("text/html" in bundle, charts.PLOTLY in bundle) == (is_html, True)


# nbclient and papermill: real (papermill also runs every lesson, in test_notebooks.py)


@pytest.mark.kernel
def test_headless_there_are_lines_a_chart_ranks_and_exercises(tmp_path, monkeypatch):
    """With what Kaggle says of itself in Save & Run All, where nobody watches either."""
    monkeypatch.setenv("KAGGLE_KERNEL_RUN_TYPE", "Batch")
    sources = (
        "import course, labkit\n%load_ext labkit",
        "def train(worker):\n    [worker.log(loss=float(step)) for step in range(3)]\n    print('bye')",
        "run = labkit.launch(train)",
        "for _ in range(3):\n    labkit.launch(train)",
        "%%ranks 2\nrank",
        "def local_indices(samples, rank, world_size, epoch, seed):\n    return []\ncourse.check(local_indices)",
    )
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    client = nbclient.NotebookClient(
        notebook,
        timeout=LONG_S,
        kernel_name="python3",
        resources={"metadata": {"path": str(beside_the_course(tmp_path))}},
    )
    client.execute()
    launched, in_a_loop, ranks, checked = (cell.outputs for cell in notebook.cells[2:])
    lines = "".join(output.text for output in launched if output.output_type == "stream")
    assert {"[rank 0] bye", "[rank 1] bye"} <= set(lines.splitlines())
    data = [output.data for output in launched if "data" in output]
    assert "train: finished · 2 ranks · step 2 · loss 2" in data[0]["text/html"]
    assert set(data[1]) == {PLOTLY, "text/plain"}
    data = [output.data for output in in_a_loop if "data" in output]
    assert [PLOTLY in each for each in data] == [False, True] * 3, "no launch waits for a chart; the cell does"
    assert ranks[0].text == "[rank 0] 0\n[rank 1] 1\n"
    assert "local_indices: wrong" in checked[0].data["text/plain"], "the reader's function, not the reference"


# A terminal: real


class Terminal:
    """A program in a terminal of its own, and who types there."""

    def __init__(self, folder, *command):
        import pexpect

        environment = {**os.environ, "TERM": "dumb", "PYTHON_BASIC_REPL": "1", "IPYTHONDIR": str(folder / "ipython")}
        self._child = pexpect.spawn(
            sys.executable,
            list(command),
            cwd=str(folder),
            env=environment,
            timeout=LONG_S,
            encoding="utf-8",
            dimensions=(50, 200),
        )

    def see(self, words):
        """Wait until something is shown; give what it is."""
        self._child.expect(words)
        return self._child.match.group(0)

    def type(self, *lines):
        for line in lines:
            self._child.sendline(line)

    def interrupt(self):
        self._child.sendintr()

    def close(self):
        self._child.kill(signal.SIGKILL)
        self._child.wait()  # pexpect itself would give up on a busy machine
        self._child.close()


@pytest.mark.kernel
@pytest.mark.parametrize("program", few(["IPython", "Python"], 2))
def test_in_a_terminal_there_are_lines_and_ctrl_c_stops_the_run(program, tmp_path):
    options = (
        ["-m", "IPython", "--simple-prompt", "--no-banner", "--colors=NoColor"] if program == "IPython" else ["-q"]
    )
    prompt = r"In \[\d+\]: " if program == "IPython" else ">>> "
    terminal = Terminal(beside_the_course(tmp_path), *options)
    try:
        terminal.see(prompt)
        terminal.type("import course, labkit, time")
        terminal.see(prompt)
        body = ["    for step in range(10**9):", "        worker.log(loss=1 / (1 + step))", "        time.sleep(0.01)"]
        terminal.type("def train(worker):", *body, "", "")
        terminal.type("run = labkit.launch(train, world_size=2)")
        terminal.see(r"train: running · 2 ranks · step \d+ · loss ")
        terminal.interrupt()
        terminal.see(r"train: stopped by an interrupt · 2 ranks · step \d+")
        terminal.see(r"What was logged, printed and returned is kept in labkit.runs\[-1\]")
        terminal.type("run = labkit.runs[-1]")
        terminal.type("print('status', run.status, len(set(run.history['rank'])))")
        terminal.see("status stopped 2\r\n")
        if program == "IPython":
            terminal.type("%load_ext labkit", "%%ranks 2", "rank + 40", "", "")
            terminal.see(r"\[rank 1\] 41")
        terminal.type("def local_indices(samples, rank, world_size, epoch, seed):", "    return []", "", "")
        terminal.type("course.check(local_indices)")
        terminal.see("local_indices: wrong")
    finally:
        terminal.close()
