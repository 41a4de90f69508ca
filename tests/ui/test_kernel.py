"""labkit driven as a reader drives it: cells sent to a real Jupyter kernel, and what they show."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import textwrap
import time

import psutil
import pytest
import torch
from jupyter_client import KernelManager

from labkit.ui import kernel
from tests.conftest import LONG_S, command_of, lives
from tests.support import prefork
from tests.support.tiers import few

WIDGET = "application/vnd.jupyter.widget-view+json"
PLOTLY = "application/vnd.plotly.v1+json"

pytestmark = pytest.mark.kernel


class Cell:
    """One executed cell: what stands under it now, and how it came there."""

    def __init__(self, msg_id):
        self.msg_id = msg_id
        self.number = None
        """As in "Cell In[3]"."""
        self.outputs = []
        """(display id or None, data) in order; an update has replaced the data, as in a saved notebook."""
        self.stdout = self.stderr = ""
        self.error = None
        self.idle_s = None
        """When it ended."""

    @property
    def data(self):
        return [data for _, data in self.outputs]

    @property
    def html(self):
        return "\n".join(data["text/html"] for data in self.data if "text/html" in data)

    def charts(self):
        return [data for data in self.data if PLOTLY in data]


class Notebook:
    """A kernel and a client that plays the front end."""

    def __init__(self, folder, watched=False, **environment):
        starting = time.monotonic()
        environment = {**os.environ, "IPYTHONDIR": str(folder / "ipython"), "MPLBACKEND": "agg", **environment}
        while True:
            self._start(folder, environment)
            try:
                self.client.wait_for_ready(timeout=LONG_S)
                break
            except RuntimeError:  # a port may have been taken since it was found free
                self.close()
                if "Address already in use" not in (folder / "kernel.log").read_text():
                    raise
        self.cells = {}
        self.ever_shown = []
        """Every bundle displayed by any cell, replaced ones included."""
        self.comms = {}
        """By id, the state with which each open comm was opened."""
        self.views = {}
        """Of each run that was shown live, what its page has been told last: see `labkit.ui.view.state_of`."""
        self.told = []
        """All that pages have been told, in order."""
        self.run("import os, time, torch, labkit, labkit.ui.view\nimport torch.distributed as dist", watched)
        self.started_s = time.monotonic() - starting
        """Seconds that the kernel took to start and import torch: what this machine takes, just now."""

    def start(self, code, watched=False, metadata=None):
        """Begin to run a cell. Where a person watches, a front end lets cells ask for input; some say the cell's id."""
        content = {"code": textwrap.dedent(code).strip(), "silent": False, "store_history": True}
        content |= {"allow_stdin": watched, "stop_on_error": True, "user_expressions": {}}
        message = self.client.session.msg("execute_request", content, metadata=metadata)
        self.client.shell_channel.send(message)
        cell = Cell(message["header"]["msg_id"])
        self.cells[cell.msg_id] = cell
        return cell

    def finish(self, cell):
        self.listen_until(lambda: cell.idle_s)
        return cell

    def run(self, code, watched=False, fails=False, metadata=None):
        """Run a cell to its end and give it."""
        cell = self.finish(self.start(code, watched, metadata))
        assert fails or cell.error is None, "\n".join(cell.error["traceback"])
        return cell

    def value(self, expression):
        """Evaluate in the kernel, and here what it prints."""
        return eval(self.run(f"print(repr({expression}))").stdout)

    def listen_until(self, condition, deadline_s=LONG_S):
        """Take what the kernel publishes until something is so."""
        deadline = time.monotonic() + deadline_s
        while not condition():
            if time.monotonic() > deadline:
                shown = [(c.number, c.stdout[-2000:], c.stderr[-2000:], c.error, c.idle_s) for c in self.cells.values()]
                raise TimeoutError(f"not within {deadline_s} s; cells so far: {shown}")
            with contextlib.suppress(queue.Empty):
                self._take(self.client.get_iopub_msg(timeout=0.005))

    def _take(self, message):
        kind, content = message["msg_type"], message["content"]
        cell = self.cells.get(message["parent_header"].get("msg_id"))
        if kind == "update_display_data":
            self._update(content["transient"]["display_id"], content["data"])
        elif kind.startswith("comm_"):
            self._take_comm(kind, content)
        elif cell is None:
            return
        elif kind == "execute_input":
            cell.number = content["execution_count"]
        elif kind == "stream":
            setattr(cell, content["name"], getattr(cell, content["name"]) + content["text"])
        elif kind in ("display_data", "execute_result"):
            self.ever_shown.append(content["data"])
            cell.outputs.append((content.get("transient", {}).get("display_id"), content["data"]))
        elif kind == "error":
            cell.error = content
        elif kind == "status" and content["execution_state"] == "idle":
            cell.idle_s = time.monotonic()

    def _update(self, display_id, data):
        self.ever_shown.append(data)
        for cell in self.cells.values():
            cell.outputs = [(id_, data if id_ == display_id else old) for id_, old in cell.outputs]

    def _take_comm(self, kind, content):
        comm_id, state = content["comm_id"], content["data"].get("state", {})
        if kind == "comm_open":
            self.comms[comm_id] = state
            if (carrier := state.get("carrier")) in self.comms:
                self._take_shown(carrier, self.comms[carrier])
        elif kind == "comm_close":
            self.comms.pop(comm_id, None)
        elif comm_id in self.carriers():
            self._take_shown(comm_id, state)

    def _take_shown(self, carrier, state):
        if "value" in state:
            self.views[carrier] = json.loads(state["value"])
            self.told.append(self.views[carrier])

    def carriers(self):
        """The comms that carry what is shown of a run, and that of the widget which draws it."""
        return {state["carrier"]: comm_id for comm_id, state in self.comms.items() if state.get("carrier")}

    @property
    def view(self):
        """What is shown of the last run that was shown live."""
        return list(self.views.values())[-1] if self.views else {"button": "", "panels": []}

    def interrupt(self):
        """The ■ button."""
        self._kernel.interrupt_kernel()

    def open_subshell(self):
        """Have the kernel make a subshell, as JupyterLab does when it first shows a widget; its id."""
        control = self.client.control_channel
        control.send(self.client.session.msg("create_subshell_request"))
        return control.get_msg(timeout=LONG_S)["content"]["subshell_id"]

    def close_subshell(self, subshell_id):
        control = self.client.control_channel
        control.send(self.client.session.msg("delete_subshell_request", {"subshell_id": subshell_id}))
        assert control.get_msg(timeout=LONG_S)["content"]["status"] == "ok"

    def click(self):
        """Click the last run's button as JupyterLab does: through a subshell, so that a busy cell is no hindrance."""
        client, subshell_id = self.client, self.open_subshell()
        carrier = list(self.views)[-1]
        comm_id, click = self.carriers()[carrier], {"clicked": self.views[carrier]["button"]}
        click = {"method": "custom", "content": click}
        message = client.session.msg("comm_msg", {"comm_id": comm_id, "data": click})
        message["header"]["subshell_id"] = subshell_id
        client.shell_channel.send(message)

    def _start(self, folder, environment):
        self._kernel = KernelManager(kernel_name="python3", connection_file=str(folder / "kernel.json"))
        with open(folder / "kernel.log", "w") as log:
            self._kernel.start_kernel(cwd=folder, env=environment, stdout=log, stderr=log)
        self.client = self._kernel.blocking_client()
        self.client.start_channels()

    def wait_until_gone(self, processes, deadline_s=LONG_S):
        """Wait for processes to end; one whose end nobody has asked for yet has ended too."""
        self.listen_until(lambda: not any(lives(process.pid) for process in processes), deadline_s)

    def start_of(self, run="run"):
        """Seconds that a run's ranks took to start, as `tests.conftest.start_of`."""
        return self.value(f"float({run}.history.groupby('rank')['time_s'].min().max())")

    def shut_down(self):
        self._kernel.shutdown_kernel(now=False)

    def close(self):
        self.client.stop_channels()
        self._kernel.shutdown_kernel(now=True)
        self._kernel.cleanup_resources()


@pytest.fixture(scope="module")
def notebook(tmp_path_factory):
    notebook = Notebook(tmp_path_factory.mktemp("kernel"))
    yield notebook
    notebook.close()


@pytest.fixture(scope="module")
def cold_notebook(tmp_path_factory):
    """One whose ranks begin as a reader's do: for what is about their beginning, or compared with its time."""
    with prefork.in_use(False):
        notebook = Notebook(tmp_path_factory.mktemp("kernel"))
    yield notebook
    notebook.close()


# By value


def test_what_earlier_cells_define_travels_and_an_edited_cell_is_what_goes_next(notebook):
    notebook.run("offset = 10")
    notebook.run("""
        class Scale:
            def __init__(self, factor):
                self.factor = factor
            def __call__(self, value):
                return self.factor * value
    """)
    helper = """
        def helper(rank):
            return Scale({factor})(rank) + offset
    """
    notebook.run(helper.format(factor=3))
    notebook.run("""
        def work(worker, last):
            return helper(worker.rank), last, Scale
    """)
    launch = "run = labkit.launch(work, 'x', world_size=2)"
    notebook.run(launch)
    assert notebook.value("[result[:2] for result in run.results]") == [(10, "x"), (13, "x")]
    assert notebook.value("run.results[0][2] is Scale")
    notebook.run(helper.format(factor=4))
    notebook.run("offset = 20")
    notebook.run(launch)
    assert notebook.value("[result[:2] for result in run.results]") == [(20, "x"), (24, "x")]


# Failing


def test_a_training_function_is_called_in_the_kernel_itself_with_the_current_worker(notebook):
    cell = notebook.run("""
        import torch, labkit
        def train(worker, steps):
            worker.expect(steps)
            model = torch.nn.Linear(2, 1).to(worker.device)
            for step in range(steps):
                loss = model(torch.ones(4, 2, device=worker.device)).pow(2).mean()
                loss.backward()
                worker.log(loss=loss.item(), samples=4)
                labkit.log(step=step, loss=loss.item())
            return worker.rank, worker.local_rank, worker.world_size, worker.device.type, worker.stopping
        print(train(labkit.current(), 3))
    """)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    assert cell.stdout == f"(0, 0, 1, {device!r}, False)\n"
    assert cell.stderr == ""
    cell = notebook.run("train(labkit.current(), 'three')", fails=True)
    assert cell.error["ename"] == "TypeError", "the function's own error, for %debug"


def test_an_error_shows_the_readers_own_cells_and_none_of_labkits_files(notebook):
    helper = notebook.run("""
        def check(batch):
            if batch == 3:
                raise ValueError("bad batch")
    """)
    train = notebook.run("""
        def train(worker):
            for step in range(5):
                worker.log(loss=1.0)
                if worker.rank == 1:
                    check(step)
                dist.barrier()
    """)
    cell = notebook.run("run = labkit.launch(train, world_size=2)", fails=True)
    assert cell.error["ename"] == "WorkerFailed"
    assert cell.error["evalue"].startswith("rank 1 failed: ValueError: bad batch (after logging step 3)")
    for shown in ("\n".join(cell.error["traceback"]), cell.html.replace("&quot;", '"')):
        assert f"Cell In[{train.number}], line 5, in train\n    check(step)" in shown
        assert f'Cell In[{helper.number}], line 3, in check\n    raise ValueError("bad batch")' in shown
        assert "ValueError: bad batch" in shown
        assert "rank 0" in shown, "what became of the other"
        assert 'labkit.explain("rank_failed")' in shown
        assert "labkit" not in shown.replace("labkit.explain", "")
    assert cell.stderr == ""


# Nobody watches


def test_a_later_cell_shows_the_run_again(notebook):
    notebook.run("run = labkit.launch(lambda worker: [worker.log(loss=step) for step in range(3)], name='again')")
    cell = notebook.run("run")
    summary, chart = cell.data
    assert "again: finished · 2 ranks · step 2 · loss 2" in summary["text/html"]
    assert "again: finished" in summary["text/plain"]
    assert PLOTLY in chart
    assert len(notebook.run("labkit.show(run)\nrun").data) == 2, "once per cell"
    assert notebook.run("repr(run)").data[0]["text/plain"].startswith("\"<Run 'again': finished, 2 ranks")


# A person watches


def test_a_watched_run_is_drawn_live_and_leaves_a_live_chart(notebook, tmp_path):
    notebook.ever_shown.clear()
    notebook.told.clear()
    before = set(notebook.comms)
    cell = notebook.start(
        f"""
        def train(worker):
            print("hello from", worker.rank)
            step = 0
            while not os.path.exists({str(tmp_path / "drawn")!r}):
                worker.log(loss=1 / (1 + step), samples=64)
                step += 1
                time.sleep(0.02)
            worker.log(step=10**6, loss=0.5)
        run = labkit.launch(train, world_size=2)
        run
        """,
        watched=True,
    )
    notebook.listen_until(lambda: cell.outputs)
    assert WIDGET in cell.data[0]
    assert cell.data[0]["text/plain"] == kernel.NO_WIDGETS, "for a front end that does not know widgets"
    # Drawn, and drawn again: the ranks go on until then.
    notebook.listen_until(lambda: sum(bool(shown["panels"]) for shown in notebook.told) >= 2)
    (tmp_path / "drawn").touch()
    notebook.finish(cell)
    notebook.listen_until(cell.charts)  # the cell waits for a second at most until the end has been drawn
    summary, chart = cell.data
    assert "train: finished · 2 ranks · step 1000000" in summary["text/html"]
    assert "<pre>hello from 1</pre>" in summary["text/html"]
    assert set(chart) == {PLOTLY, "text/plain"}, "beside a picture, JupyterLab would show the picture"
    assert sum(WIDGET in data for data in notebook.ever_shown) == 1
    assert all(len(data.get("text/html", "")) < 20_000 for data in cell.data)
    assert cell.stdout == cell.stderr == ""
    assert "train: finished" in notebook.view["html"], "for a page that was reloaded"
    assert len(set(notebook.comms) - before) == 5, "the widget, what it shows, their layouts and a style"


SPIN = """
def spin(worker):
    while True:
        worker.log(loss=1.0)
        dist.barrier()
        time.sleep(0.02)
"""


def test_the_stop_button_works_while_its_cell_is_waiting(notebook, start_s):
    notebook.run(SPIN)
    before, began = set(notebook.views), time.monotonic()
    cell = notebook.start("run = labkit.launch(spin)", watched=True)
    notebook.listen_until(lambda: drawn_since(notebook, before))
    asked, word = time.monotonic(), notebook.view["button"]
    if word != "Stop":  # an old kernel cannot hear a click while it runs a cell
        assert word == "use kernel ■"
        assert "needs a kernel with subshells, ipykernel 7" in notebook.view["hint"]
        notebook.interrupt()
    else:
        notebook.click()
    notebook.finish(cell)
    assert (word == "Stop") == notebook.value("labkit.ui.kernel.has_subshells()")
    assert cell.idle_s - asked < max(start_s, asked - began), "sooner than ranks start, or than these were drawn"
    assert (cell.error is None) == notebook.value("labkit.ui.kernel.has_subshells()"), "an interrupt raises"
    notebook.listen_until(cell.charts)  # where a person watches, the cell is free before
    assert "spin: stopped" in cell.html
    assert notebook.value("labkit.runs[-1].status") == "stopped"


# In the background


@pytest.mark.cold
def test_a_background_run_goes_on_while_later_cells_run(cold_notebook):
    notebook = cold_notebook
    notebook.run(SPIN)
    launched = notebook.run(
        """
        start = time.monotonic()
        run = labkit.launch(spin, wait=False)
        print(time.monotonic() - start)
        run
        """,
        watched=True,
    )
    assert len(launched.outputs) == 2, "a view and a place for the chart, once"
    assert WIDGET in launched.data[0]
    assert notebook.value("run.status") == "running"
    steps = set()
    while len(steps) < 4:
        steps.add(int(notebook.run("time.sleep(0.3); print(len(run.history))", watched=True).stdout))
    assert float(launched.stdout) < notebook.start_of(), "the launch does not wait for the ranks"
    again = notebook.run("run", watched=True)
    assert WIDGET in again.data[0]
    stopping = notebook.run("run.stop()\nprint(run.status)", watched=True)
    assert stopping.stdout.endswith("stopped\n")
    notebook.listen_until(launched.charts)
    assert "spin: stopped" in launched.html
    assert len(launched.outputs) == 2
    notebook.listen_until(again.charts)
    assert "spin: stopped" in again.html
    assert not any(WIDGET in data for data in launched.data + again.data)


def test_a_background_run_that_fails_disturbs_no_other_cell(notebook):
    launched = notebook.run("""
        def train(worker):
            raise ValueError("bad batch")
        run = labkit.launch(train, wait=False)
    """)
    other = notebook.run("while run.status == 'running': time.sleep(0.05)")
    assert other.error is None
    notebook.listen_until(lambda: "ValueError: bad batch" in launched.html)
    assert notebook.run("print(run.error.rank)\nrun").error is None
    waited = notebook.run("run.wait()", fails=True)
    assert waited.error["ename"] == "WorkerFailed"
    assert "bad batch" in waited.error["evalue"]


# A cell that is run again


def statuses(notebook, *names):
    return notebook.value(f"[run.status for run in ({', '.join(names)},)]")


def test_a_cell_that_is_run_again_stops_what_it_had_launched_and_no_other_cell_does(notebook):
    notebook.run(SPIN)
    notebook.run("runs = []")
    again = "runs += [labkit.launch(spin, wait=False) for _ in range(2)]"
    notebook.run(again)
    assert statuses(notebook, "*runs") == ["running"] * 2, "several launches in one execution"
    notebook.run("while len(runs[0].history) < 10: time.sleep(0.02)")
    notebook.run(again)
    assert statuses(notebook, "*runs") == ["stopped", "stopped", "running", "running"]
    assert notebook.value("(runs[0].history.groupby('rank')['step'].max().nunique(), runs[0].error)") == (1, None)
    notebook.run("other = labkit.launch(spin, wait=False)")
    assert statuses(notebook, "runs[2]", "other") == ["running", "running"]
    notebook.run("for run in (*runs, other): run.stop()")


# Interrupts


def drawn_since(notebook, before):
    """Whether a curve has been drawn of a run that was not there before."""
    return any(shown["panels"] for carrier, shown in notebook.views.items() if carrier not in before)


def interrupt_when(notebook, cell, condition):
    """Press ■ as soon as something is so; give the seconds that the cell took to end.

    A cell that sleeps then does so bit by bit: a signal that comes just before Python sleeps is seen just after.
    """
    notebook.listen_until(condition)
    asked = time.monotonic()
    notebook.interrupt()
    notebook.finish(cell)
    return cell.idle_s - asked


def ranks_alive(notebook):
    kernel = psutil.Process(notebook.value("os.getpid()"))
    return [child for child in kernel.children() if "spawn_main" in command_of(child)]


@pytest.mark.parametrize("watched", [False, True])
def test_an_interrupt_stops_a_stuck_run_and_keeps_what_was_logged(notebook, start_s, watched):
    notebook.run(f"""
        def stuck(worker):
            worker.log(loss=1.0)
            print("logged")
            if {watched} and worker.rank == 1:
                dist.barrier()
            time.sleep(1e6)
    """)
    before = set(notebook.views)
    cell = notebook.start("run = labkit.launch(stuck)\nprint('went on')", watched)
    next_cell = notebook.start("print('the next cell')")
    if watched:
        took_s = interrupt_when(notebook, cell, lambda: drawn_since(notebook, before))
    else:
        took_s = interrupt_when(notebook, cell, lambda: cell.stdout.count("logged") == 2)
    assert took_s < 2 * start_s, "soon, as times go here"
    assert "run 'stuck' was interrupted and stopped" in cell.error["evalue"], "no success"
    assert ("time.sleep at Cell In" in cell.error["evalue"]) == (not watched), "where nobody watches, where ranks were"
    assert "went on" not in cell.stdout
    notebook.finish(next_cell)
    assert next_cell.stdout == "", "the queue of cells is stopped, too"
    assert cell.stderr == ""
    notebook.listen_until(cell.charts)  # where a person watches, the cell is free before
    assert "stuck: stopped by an interrupt" in cell.html
    assert not any(WIDGET in data for data in cell.data)
    notebook.run("run = labkit.runs[-1]")
    assert notebook.value("(run.status, len(run.history), run.error)") == ("stopped", 2, None)
    notebook.run("run = labkit.launch(lambda worker: worker.rank, world_size=1)")
    assert notebook.value("run.results") == [0], "the kernel can launch again"


@pytest.mark.parametrize(("pause_s", "watched"), few([(0.01, True), (0.2, False)], 2))
def test_a_second_interrupt_in_quick_succession_leaves_the_notebook_usable(notebook, pause_s, watched, tmp_path):
    """Monarch #862, where Ctrl-C is "messy". The ranks here would use up their grace."""
    notebook.run("""
        def deaf(worker, marks):
            open(f"{marks}/{worker.rank}", "w").close()
            while True:
                pass
    """)
    cell = notebook.start(f"run = labkit.launch(deaf, {str(tmp_path)!r})\nprint('after')", watched)
    notebook.listen_until(lambda: len(list(tmp_path.glob("[01]"))) == 2 and (cell.stdout or cell.outputs))
    notebook.interrupt()
    time.sleep(pause_s)
    notebook.interrupt()
    notebook.finish(cell)
    assert "run 'deaf' was interrupted and stopped" in cell.error["evalue"]
    assert "after" not in cell.stdout
    assert notebook.value("(labkit.runs[-1].status, labkit.runs[-1].error)") == ("stopped", None)
    assert notebook.value("labkit.launch(lambda worker: worker.rank, live=False).results") == [0, 1]


def test_an_interrupt_that_comes_before_launch_waits_stops_the_run(notebook):
    """The first live view imports the widgets, which takes a while; the ranks are on their way by then."""
    notebook.run(SPIN)
    notebook.run("""
        from labkit.ui import present
        def slow(run, *options, watch=present.watch):
            present.watch = watch
            while "starting" in run.states:
                time.sleep(0.01)
            print("ranks run, no view yet", flush=True)
            while True:
                time.sleep(0.01)
            return watch(run, *options)
        present.watch = slow
        run = None
    """)
    cell = notebook.start("run = labkit.launch(spin)")
    interrupt_when(notebook, cell, lambda: "no view yet" in cell.stdout)
    assert not ranks_alive(notebook)
    assert cell.error["ename"] == "RunInterrupted"
    assert notebook.value("labkit.runs[-1].status") == "stopped"


@pytest.mark.cold
def test_an_interrupt_while_processes_are_being_started_leaves_none_behind(cold_notebook):
    notebook = cold_notebook
    notebook.run(SPIN)
    notebook.run("""
        from labkit.engines import spawn
        def slow(*how, _spawn=spawn._spawn):
            spawn._spawn = _spawn
            print("no process yet", flush=True)
            time.sleep(0.5)
            return _spawn(*how)
        spawn._spawn = slow
    """)
    cell = notebook.start("labkit.launch(spin)")
    interrupt_when(notebook, cell, lambda: "no process yet" in cell.stdout)
    assert cell.error["ename"] in ("KeyboardInterrupt", "RunInterrupted")
    notebook.run("time.sleep(2)")  # for any that come late
    notebook.wait_until_gone(ranks_alive(notebook))


@pytest.mark.cold
def test_an_interrupt_of_another_cell_does_not_reach_ranks_that_are_starting(cold_notebook):
    notebook = cold_notebook
    notebook.run("run = labkit.launch(lambda worker: worker.rank, wait=False)")
    cell = notebook.start("time.sleep(0.3)\nprint('sleeping', flush=True)\nwhile True: time.sleep(0.01)")
    interrupt_when(notebook, cell, lambda: "sleeping" in cell.stdout)
    assert cell.error["ename"] == "KeyboardInterrupt"
    waited = notebook.run("print(run.wait().results)", fails=True)
    assert waited.error is None, waited.error["evalue"] + cell.stderr
    assert waited.stdout.endswith("[0, 1]\n")
    assert "KeyboardInterrupt" not in cell.stderr + waited.stderr, "of a rank"


# Ahead of the first launch


def wait_until_true(notebook, expression, watched=True):
    """Ask the kernel until something is so there; each question is a cell."""
    deadline = time.monotonic() + LONG_S
    while notebook.run(f"print({expression})", watched).stdout.strip() != "True":
        assert time.monotonic() < deadline, f"not within {LONG_S} s: {expression}"
        time.sleep(0.1)


@pytest.mark.cold
def test_where_a_person_works_ranks_stand_by_for_the_first_launch_and_mind_what_cells_change(tmp_path):
    notebook = Notebook(tmp_path, watched=True, LABKIT_STANDBY="on")
    try:
        notebook.run("def pid(worker): return os.getpid(), os.environ.get('LESSON')", watched=True)
        wait_until_true(notebook, "len(labkit.standby.pids()) == 2")
        ready = notebook.value("labkit.standby.pids()")
        assert not notebook.value("torch.cuda.is_initialized()")
        notebook.run("run = labkit.launch(pid)", watched=True)
        assert notebook.value("run.results") == [(pid, None) for pid in ready]
        wait_until_true(notebook, "len(labkit.standby.pids()) == 2")
        outdated = notebook.value("labkit.standby.pids()")
        notebook.run("os.environ['LESSON'] = '6'", watched=True)
        wait_until_true(notebook, f"len(labkit.standby.pids()) == 2 and labkit.standby.pids() != {outdated}")
        ready = notebook.value("labkit.standby.pids()")
        notebook.run("run = labkit.launch(pid)", watched=True)
        assert notebook.value("run.results") == [(pid, "6") for pid in ready]
    finally:
        notebook.close()
