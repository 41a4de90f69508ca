"""Measure labkit and other launchers on one job, each from the cells of a real Jupyter kernel: `make scoreboard`.

Every trial has a fresh kernel, driven as a front end drives it, and a deadline. The job is DDP on a linear layer, two
ranks, gloo on the loopback interface, no GPU. Raw figures go to build/scoreboard.json as they come; a partial
measurement replaces only what it measures again. From that file the program makes the guide's table,
notebooks/images/scoreboard.png and build/scoreboard.html.

    python -m tests.benchmarks.scoreboard --repeats 1 --only labkit --rows first second
    python -m tests.benchmarks.scoreboard --load --rows second stuck        (beside a busy process on every core)
    python -m tests.benchmarks.scoreboard --repeats 0 --write-guide         (measure nothing, report again)
"""

import argparse
import contextlib
import inspect
import json
import math
import os
import platform
import queue
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import plotly.graph_objects as go
import psutil
from jupyter_client import KernelManager

from labkit import charts
from labkit.ui.pictures import picture
from tests.benchmarks.launch import free_port, time_logging

ROOT = Path(__file__).parents[2]
FIGURES = ROOT / "notebooks" / "guide" / "figures.md"
DEADLINE_S = 45.0
PAUSE_S = 6.0
"""Between the end of the first launch and the start of the second, for every tool."""

IN_A_ROW = 5
"""Launches in a row of which a trial gives the median."""

MARKER = "SCOREBOARD_TRIAL"
"""The environment variable by which all processes of a trial are found, whoever started them."""

ROWS = {
    "first": "first launch → first optimizer step (s)",
    "second": "second launch → first optimizer step (s)",
    "idle": "first launch 6 s after the tool's import → first optimizer step (s)",
    "row": "launches back to back → first optimizer step (s)",
    "threads": "first launch, multi-threaded tensor work before and in it (s)",
    "failure": "a rank raises → error in the cell (s)",
    "stop": "Stop, ranks training → free cell (s)",
    "stuck": "Stop, collective stuck → free cell (s)",
    "left": "processes left 5 s after the kernel is killed",
    "log": "cost of logging every step of 1 ms (%)",
}
BUSY = " while every core has other work"
"""What a row's title ends with that was measured beside a busy process on every core (`--load`)."""

IN_CHART = {
    "first": "first launch",
    "second": "second launch",
    "idle": "first, 6 s after import",
    "row": "back to back",
    "threads": "launch after threads",
    "failure": "failure → error",
    "stop": "Stop, training",
    "stuck": "Stop, stuck",
}


# What is launched


def job(rank: int, row: str, folder: str, log=lambda **values: None) -> None:
    """Train on one rank, in a process group that exists already, and do what the row asks for."""
    import os
    import time
    from pathlib import Path

    import torch
    import torch.distributed as dist

    def note(what: str, value: float) -> None:
        Path(folder, f"{what}.{rank}").write_text(f"{value!r}\n")

    note("pid", os.getpid())
    try:
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 10))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        batch = torch.randn(8192 if row == "threads" else 32, 64)
        start = time.monotonic()
        step = 0
        while step < 6 if row in ("first", "second", "idle", "row", "threads") else time.monotonic() - start < 150:
            loss = model(batch).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step == 0:
                note("step", time.time())
            log(loss=loss.item())
            if step == 5 and rank == 1 and row == "failure":
                note("raised", time.time())
                raise ValueError("bad " + "batch")  # in two parts: this line itself may stand in a traceback
            while step == 5 and rank == 1 and row == "stuck":
                note("stuck", time.time())
                time.sleep(3600)
            dist.all_reduce(loss.detach())
            time.sleep(0.01)
            step += 1
    finally:
        note("left", time.time())


IMPORTS = "import os, torch, torch.distributed as dist\nfrom torch.nn.parallel import DistributedDataParallel\n"
"""What a notebook that trains has imported before it launches, whatever launches."""

MODULE = f"""{IMPORTS}
def train(rank, row, folder):
    dist.init_process_group("gloo", init_method=f"file://{{folder}}/store", rank=rank, world_size=2)
    job(rank, row, folder)
    dist.destroy_process_group()
"""
"""What plain mp.spawn needs beside `job` in a module file, for it cannot take a function from a cell."""


class Tool(NamedTuple):
    """One way to launch: its package, and cells that follow those with the imports and `job`."""

    package: str
    setup: str
    launch: str
    """With {row}, {folder} and {port} to be filled in."""
    reserve: str = ""
    """What is run, and then launched, where many launches follow each other."""
    launch_reserved: str = ""


LABKIT = """
def train(worker):
    job(worker.rank, {row!r}, {folder!r}, worker.log)
run = labkit.launch(train, world_size=2)
"""
LABKIT_RESERVED = LABKIT.replace("world_size=2", "on=ranks")
SPAWN = """
mp.spawn(scoreboard_job.train, args=({row!r}, {folder!r}), nprocs=2)
"""
ACCELERATE = """
def train(row, folder):
    job(Accelerator(cpu=True).process_index, row, folder)
notebook_launcher(train, ({row!r}, {folder!r}), num_processes=2, use_port="{port}")
"""
LIGHTNING = """
def train(fabric):
    job(fabric.global_rank, {row!r}, {folder!r})
Fabric(accelerator="cpu", devices=2, strategy="ddp_notebook").launch(train)
"""
TORCHRUNX = """
def train(row, folder):
    job(int(os.environ["RANK"]), row, folder)
launcher = Launcher(workers_per_host=2, backend="gloo", extra_env_vars={{"GLOO_SOCKET_IFNAME": "lo"}})
launcher.run(train, {row!r}, {folder!r})
"""
# As a cell that begins with %%px: it passes an interrupt on to the engines.
IPYPARALLEL = """
if "view" not in globals():
    view = ipp.Cluster(n=2, controller_ip="127.0.0.1").start_and_connect_sync(activate=True)[:]
    view.scatter("rank", range(2), flatten=True, block=True)
    view.push(dict(job=job), block=True)
get_ipython().run_cell_magic("px", "--block", '''
import torch.distributed as dist
if not dist.is_initialized():
    dist.init_process_group("gloo", init_method="file://{folder}/store", rank=rank, world_size=2)
job(rank, {row!r}, {folder!r})
''')
"""
# One actor a rank, which stays, and with it the process group and what earlier launches have left. `get` waits. torch
# is imported as its process begins: within a cell's code that fails, as the cell's lines are looked for meanwhile.
MONARCH_IMPORTS = """
from functools import partial
from importlib import import_module
from monarch.actor import Actor, current_rank, endpoint, this_host
"""
MONARCH = """
if "ranks" not in globals():
    class Rank(Actor):
        @endpoint
        def train(self, job, row, folder):
            import torch.distributed as dist
            rank = current_rank().rank
            if not dist.is_initialized():
                dist.init_process_group("gloo", init_method=f"file://{{folder}}/store", rank=rank, world_size=2)
            job(rank, row, folder)
    processes = this_host().spawn_procs(per_host={{"gpus": 2}}, bootstrap=partial(import_module, "torch.distributed"))
    ranks = processes.spawn("ranks", Rank)
ranks.train.call(job, {row!r}, {folder!r}).get()
"""
# torchrunx's log server unpickles what comes, and listens on the address of the machine's full name.
ONLY_LOOPBACK = "import socket\nsocket.getfqdn = lambda name='': '127.0.0.1'"

TOOLS = {
    "labkit": Tool("labkit", "import labkit", LABKIT, "ranks = labkit.Session(2)", LABKIT_RESERVED),
    "mp.spawn": Tool("torch", "import torch.multiprocessing as mp, scoreboard_job", SPAWN),
    "Accelerate": Tool("accelerate", "from accelerate import Accelerator, notebook_launcher", ACCELERATE),
    "Lightning": Tool("lightning", "from lightning.fabric import Fabric", LIGHTNING),
    "torchrunx": Tool("torchrunx", f"from torchrunx import Launcher\n{ONLY_LOOPBACK}", TORCHRUNX),
    "ipyparallel": Tool("ipyparallel", "import ipyparallel as ipp", IPYPARALLEL),
    "Monarch": Tool("torchmonarch", MONARCH_IMPORTS, MONARCH),
}


# The kernel that launches


class Cell:
    """One executed cell. All times are `time.time()`, as the ranks note theirs."""

    def __init__(self, message_id: str) -> None:
        self.message_id = message_id
        self.sent_s = time.time()
        self.idle_s = self.error_s = 0.0
        self.error = self.printed = ""


class Trial:
    """A fresh kernel for one tool, in a folder of its own."""

    def __init__(self, tool: Tool, folder: Path) -> None:
        self.tool, self.folder, self.marker = tool, folder, uuid.uuid4().hex
        self.cells: dict[str, Cell] = {}
        (folder / "scoreboard_job.py").write_text(inspect.getsource(job) + "\n\n" + MODULE)
        self.manager = KernelManager(kernel_name="python3", connection_file=str(folder / "kernel.json"))
        extra = {"GLOO_SOCKET_IFNAME": "lo", "IPYTHONDIR": str(folder), "MPLBACKEND": "agg", MARKER: self.marker}
        with open(folder / "kernel.log", "w") as log:
            self.manager.start_kernel(cwd=folder, env={**os.environ, **extra}, stdout=log, stderr=log)
        self.kernel = psutil.Process(self.manager.provisioner.process.pid)
        self.client = self.manager.blocking_client()
        self.client.start_channels()

    def start(self, code: str) -> Cell:
        """Send a cell."""
        cell = Cell(self.client.execute(textwrap.dedent(code).strip(), allow_stdin=True))
        return self.cells.setdefault(cell.message_id, cell)

    def finish(self, cell: Cell) -> Cell:
        """Wait for the end of a cell that must succeed."""
        self.until(lambda: cell.idle_s, DEADLINE_S)
        if cell.error:
            raise RuntimeError(cell.error[:2000])
        return cell

    def launch(self, row: str, name: str = "launch") -> tuple[Cell, Path]:
        """Send the tool's launch cell; give it and the folder in which its ranks note what they do."""
        notes = self.folder / name
        notes.mkdir()
        cell = self.tool.launch_reserved if row == "row" and self.tool.reserve else self.tool.launch
        return self.start(cell.format(row=row, folder=str(notes), port=free_port())), notes

    def until(self, condition: Callable[[], Any], deadline_s: float) -> None:
        """Take what the kernel publishes until something is so. Raises TimeoutError."""
        deadline = time.monotonic() + deadline_s
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError
            with contextlib.suppress(queue.Empty):
                self._take(self.client.get_iopub_msg(timeout=0.005))

    def pause(self, seconds: float) -> None:
        """Go on listening for so long."""
        with contextlib.suppress(TimeoutError):
            self.until(lambda: False, seconds)

    def _take(self, message: dict[str, Any]) -> None:
        cell = self.cells.get(message["parent_header"].get("msg_id"), Cell(""))
        kind, content = message["msg_type"], message["content"]
        if kind == "error":
            text = "\n".join([content["ename"] + ": " + content["evalue"], *content["traceback"]])
            cell.error, cell.error_s = re.sub(r"\x1b\[[0-9;]*m", "", text), time.time()
        elif kind == "stream":
            cell.printed += content["text"]
        elif kind == "status" and content["execution_state"] == "idle":
            cell.idle_s = time.time()

    def noted(self, notes: Path, what: str, ranks: tuple[int, ...], cell: Cell) -> float:
        """Wait until the ranks have noted something; give the latest time. Raises RuntimeError if the cell ends."""
        files = [notes / f"{what}.{rank}" for rank in ranks]

        def all_noted() -> bool:
            noted = all(file.exists() and file.read_text().endswith("\n") for file in files)
            if not noted and cell.idle_s and time.time() > cell.idle_s + 1:
                raise RuntimeError(cell.error[:2000] or f"the cell ended without {what!r}")
            return noted

        self.until(all_noted, DEADLINE_S - (time.time() - cell.sent_s))
        return max(float(file.read_text()) for file in files)

    def processes(self) -> set[psutil.Process]:
        """Give all living processes of this trial but the kernel."""
        found = set()
        with contextlib.suppress(psutil.NoSuchProcess):
            found |= set(self.kernel.children(recursive=True))
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                if process.environ().get(MARKER) == self.marker:
                    found.add(process)
        return {process for process in found - {self.kernel} if lives(process)}

    def close(self) -> None:
        """End the kernel and every process of the trial, by pid."""
        left = self.processes()
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)
        while left := {process for process in left if lives(process)} | self.processes():
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(left, timeout=0.5)


def lives(process: psutil.Process) -> bool:
    """Whether a process runs and is not a zombie."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# How the rows are measured: each function makes one trial and gives (row, figures)

Figures = Iterator[tuple[str, dict[str, Any]]]


def launch(trial: Trial, row: str) -> Figures:
    """Time a launch, and then a second one; or one where kernel and ranks do work that wants a pool of threads."""
    if row == "threads":
        trial.finish(trial.start("a = torch.randn(2000, 2000)\nfor _ in range(3):\n    a = a @ a / 2000"))
    for name in ("first", "second") if row == "first" else (row,):
        cell, notes = trial.launch(name, name)
        yield name, {"value": trial.noted(notes, "step", (0, 1), cell) - cell.sent_s}
        trial.finish(cell)
        trial.pause(PAUSE_S if name == "first" else 0)


def launch_after_import(trial: Trial, row: str) -> Figures:
    """Time a first launch when the reader has read for a while."""
    trial.pause(PAUSE_S)
    cell, notes = trial.launch(row)
    yield row, {"value": trial.noted(notes, "step", (0, 1), cell) - cell.sent_s}
    trial.finish(cell)


def launches_in_a_row(trial: Trial, row: str) -> Figures:
    """Time launches that are sent as soon as the one before has ended, on ranks that are reserved where a tool can.

    The first is not counted: it has the tool's start in it.
    """
    if trial.tool.reserve:
        trial.finish(trial.start(trial.tool.reserve))
    values = []
    for number in range(1 + IN_A_ROW):
        cell, notes = trial.launch(row, f"launch{number}")
        values.append(trial.noted(notes, "step", (0, 1), cell) - cell.sent_s)
        trial.finish(cell)
    yield row, {"value": statistics.median(values[1:]), "worst": max(values[1:]), "first": values[0]}


def failure(trial: Trial, row: str) -> Figures:
    """Time from the raise on rank 1 to the cell's error, and look at what the error says."""
    cell, notes = trial.launch(row)
    raised_s = trial.noted(notes, "raised", (1,), cell)
    with contextlib.suppress(TimeoutError):
        trial.until(lambda: cell.idle_s, DEADLINE_S - (time.time() - raised_s))
    named, printed = ("bad batch" in text for text in (cell.error, cell.printed))
    ranks = set(re.findall(r"(?:rank|process|engine)[ :]+([01])\b", cell.error, re.IGNORECASE))
    said = {"named": named, "wrong": not named and ranks == {"0"}, "printed": printed, "error": cell.error[-3000:]}
    yield row, {**said, **({"value": cell.error_s - raised_s} if cell.error else {"late": True})}


def stop(trial: Trial, row: str) -> Figures:
    """Time from the interrupt to the free cell, and look whether the ranks have heard of it too."""
    cell, notes = trial.launch(row)
    trial.noted(notes, "step", (0, 1), cell)
    if row == "stuck":
        trial.noted(notes, "stuck", (1,), cell)
    processes = [psutil.Process(int((notes / f"pid.{rank}").read_text())) for rank in (0, 1)]
    trial.pause(1)
    if cell.idle_s:
        raise RuntimeError(cell.error[:2000] or "the cell ended before it was interrupted")
    asked_s = time.time()
    trial.manager.interrupt_kernel()
    trial.until(lambda: cell.idle_s, DEADLINE_S)
    trial.pause(2)
    go_on = [not (notes / f"left.{rank}").exists() and lives(processes[rank]) for rank in (0, 1)]
    yield row, {"value": cell.idle_s - asked_s, "ranks_go_on": sum(go_on), "error": cell.error[:200]}


def kill_kernel(trial: Trial, row: str) -> Figures:
    """Count what lives 5 s after the kernel was killed while its ranks train."""
    cell, notes = trial.launch(row)
    trial.noted(notes, "step", (0, 1), cell)
    trial.pause(1)
    before = trial.processes()
    trial.kernel.kill()
    time.sleep(5)
    after = [process for process in before | trial.processes() if lives(process)]
    yield row, {"value": len(after), "before": len(before), "processes": [" ".join(p.cmdline()) for p in after]}


def log_cost(trial: Trial, row: str) -> Figures:
    """Compare steps of 1 ms with and without a log call, alternating, in percent; the dearer rank counts."""
    cells = "import statistics, time\n" + inspect.getsource(time_logging)
    cells += "\nresults = labkit.launch(time_logging, world_size=2).results\nprint('medians', results)"
    printed = trial.finish(trial.start(cells)).printed
    medians = json.loads(printed.rpartition("medians")[2].replace("(", "[").replace(")", "]"))
    yield row, {"value": max(100 * (logged / plain - 1) for plain, logged in medians)}


MEASURES = {"first": launch, "threads": launch, "failure": failure, "stop": stop, "stuck": stop}
MEASURES |= {"idle": launch_after_import, "row": launches_in_a_row}
MEASURES |= {"left": kill_kernel, "log": log_cost}


def measure(tool: Tool, row: str) -> dict[str, dict[str, Any]]:
    """Make one trial; give its figures by row. What goes wrong is a figure too."""
    figures: dict[str, dict[str, Any]] = {}
    instead: dict[str, Any] = {}
    trial = None
    folder = Path(tempfile.mkdtemp(prefix="scoreboard-"))
    try:
        trial = Trial(tool, folder)
        trial.client.wait_for_ready(timeout=60)
        for cell in (IMPORTS, inspect.getsource(job), tool.setup):
            trial.finish(trial.start(cell))
        for name, figure in MEASURES[row](trial, row):
            figures[name] = figure
    except TimeoutError:
        instead = {"late": True}
    except (RuntimeError, OSError, ValueError, psutil.Error) as error:
        instead = {"failed": f"{type(error).__name__}: {error}".removeprefix("RuntimeError: ")}
    finally:
        if trial is not None:
            trial.close()
        shutil.rmtree(folder, ignore_errors=True)
    return {name: figures.get(name, instead) for name in (("first", "second") if row == "first" else (row,))}


@contextlib.contextmanager
def busy_cores(count: int) -> Iterator[None]:
    """Keep so many cores busy with other work."""
    command = [sys.executable, "-c", "while True: pass"]
    others = [subprocess.Popen(command, env={**os.environ, "LABKIT_STANDBY": "off"}) for _ in range(count)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


# The report


def digits(value: float) -> str:
    """Write a number with two significant digits."""
    if value == 0:
        return "0"
    if math.isinf(value):
        return f"> {DEADLINE_S:.0f}"
    decimals = 1 - math.floor(math.log10(abs(float(f"{value:.1e}"))))
    return f"{round(value, decimals):.{max(0, decimals)}f}"


class Summary(NamedTuple):
    """All trials of one tool at one row."""

    text: str = "—"
    median: float = math.nan
    """Infinite if most trials passed the deadline; NaN if there is none to compare."""
    wrong: float = math.inf
    """The share of trials that were fast, perhaps, but did not do what was asked for."""


def summarize(row: str, trials: list[dict[str, Any]]) -> Summary:
    """Put the trials of one tool at one row into words and numbers."""
    count = len(trials)
    failed = [trial["failed"].splitlines()[0][:60] for trial in trials if "failed" in trial]
    if failed or not trials:
        return Summary(f"failed {len(failed)}/{count}: {failed[0]}") if failed else Summary()
    values = sorted(math.inf if "late" in trial else trial["value"] for trial in trials)
    median = statistics.median_high(values)
    low, middle, high = (f"{v:.0f}" if row == "left" else digits(v) for v in (values[0], median, values[-1]))
    text = middle if low == high else f"{middle} ({low}–{high})"
    named, printed, blamed, go_on = (
        sum(bool(trial.get(key)) for trial in trials) for key in ("named", "printed", "wrong", "ranks_go_on")
    )
    if row.removesuffix(BUSY) == "failure":
        text += f", cause named {named}/{count}" + (f", wrong rank {blamed}/{count}" if blamed else "")
        text += f", only printed {printed}/{count}" if printed and not named else ""
        return Summary(text, median, 1 - named / count)
    return Summary(text + (f", ranks go on {go_on}/{count}" if go_on else ""), median, go_on / count)


def summaries(scores: dict[str, Any], row: str) -> dict[str, Summary]:
    """Give each tool's summary at one row."""
    trials = [trial for trial in scores["trials"] if trial["row"] == row]
    return {tool: summarize(row, [trial for trial in trials if trial["tool"] == tool]) for tool in TOOLS}


def table(scores: dict[str, Any]) -> str:
    """Give the Markdown table and the lines beneath; the best of each row is bold."""
    lines = ["| | " + " | ".join(TOOLS) + " |", "|---" * (len(TOOLS) + 1) + "|"]
    measured = {trial["row"] for trial in scores["trials"]}
    rows = {**ROWS, **{row + BUSY: title + BUSY for row, title in ROWS.items() if row + BUSY in measured}}
    for row, title in rows.items():
        found = summaries(scores, row).values()
        merits = [(s.wrong, float(digits(s.median))) if math.isfinite(s.median) else (math.inf, 0.0) for s in found]
        best = min(merits) if sum(wrong < math.inf for wrong, _ in merits) > 1 else None
        texts = [s.text.replace("|", "/") for s in found]
        cells = [f"**{text}**" if merit == best else text for text, merit in zip(texts, merits, strict=True)]
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
    known = [(trial["row"], trial["tool"]) for trial in scores["trials"]]
    repeats = sorted({known.count(pair) for pair in known})
    facts = scores["facts"]
    note = f"""Median (least–greatest) of {"–".join(map(str, repeats))} trials, each in a fresh kernel that has imported
        torch and the tool; two ranks, gloo; a trial ends at {DEADLINE_S:.0f} s. The second launch is sent
        {PAUSE_S:.0f} s after the first has ended. Back to back is the median of {IN_A_ROW} launches after a first, each
        sent when the one before has ended, by labkit on reserved ranks. mp.spawn gets its function from a module file,
        the others from the cell. *Ranks go on*: two seconds after the cell was free, a rank was still in the job.
        —: no stream of metrics from the ranks."""
    versions = ", ".join(f"{package} {version}" for package, version in facts["versions"].items())
    return "\n".join([*lines, "", " ".join(note.split()), "", f"{facts['date']}, {facts['machine']}; {versions}."])


def chart(scores: dict[str, Any]) -> charts.Chart:
    """Draw the timed rows: a group per row, a bar per tool. A hatched bar was late or not right, and says which."""
    found = {row: summaries(scores, row) for row in IN_CHART}
    figure = go.Figure()
    for index, tool in enumerate(TOOLS):
        rows = [row for row in IN_CHART if found[row][tool].median >= 0]
        medians = [found[row][tool].median for row in rows]
        flaws = [
            "" if found[row][tool].wrong < 0.5 else "cause not named" if row == "failure" else "ranks go on"
            for row in rows
        ]
        hatch = ["/" if flaw or median > DEADLINE_S else "" for flaw, median in zip(flaws, medians, strict=True)]
        figure.add_bar(
            name=tool,
            orientation="h",
            y=[IN_CHART[row] for row in rows],
            x=[min(median, DEADLINE_S) for median in medians],
            text=[f"{digits(m)} {flaw if m < DEADLINE_S else ''}" for m, flaw in zip(medians, flaws, strict=True)],
            textposition="outside",
            marker={"color": charts.rank_color(index), "pattern": {"shape": hatch}},
        )
    least = min((x for trace in figure.data for x in trace.x), default=0.1)
    figure.update_xaxes(type="log", range=[math.log10(least / 2), math.log10(3 * DEADLINE_S)], title_text="seconds")
    figure.update_yaxes(autorange="reversed")
    figure.update_layout(barmode="group")
    charts.style(figure, "Two ranks launched from a notebook cell: seconds, less is better", height=760)
    return charts.Chart(figure.update_layout(hovermode="closest"))


def write_between_markers(page: Path, text: str) -> None:
    """Replace what stands between the two scoreboard markers of a page."""
    begin, end = "<!-- scoreboard -->", "<!-- /scoreboard -->"
    before, begun, rest = page.read_text().partition(begin)
    _, ended, after = rest.partition(end)
    if not (begun and ended):
        raise SystemExit(f"{page} has no place for the table: put {begin} and, some lines below, {end} into it")
    page.write_text(f"{before}{begin}\n{text}\n{end}{after}")


def facts() -> dict[str, Any]:
    """Give what the figures depend on: date, machine, versions. A tool that is not installed has none."""
    versions = {"Python": platform.python_version()}
    for package in ("ipykernel", *(tool.package for tool in TOOLS.values())):
        with contextlib.suppress(metadata.PackageNotFoundError):
            # On the package index "labkit" is another project.
            versions[package] = metadata.version("labkit-torch" if package == "labkit" else package)
    machine = f"{os.cpu_count()} CPU cores, {platform.system()} {platform.machine()}"
    return {"date": time.strftime("%Y-%m-%d"), "machine": machine, "versions": versions}


def main() -> None:
    """Measure what was asked for, then report all that is known."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="trials of each tool at each row")
    parser.add_argument("--only", nargs="+", default=list(TOOLS), choices=TOOLS)
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=ROWS)
    parser.add_argument("--load", action="store_true", help="beside a busy process on every core")
    parser.add_argument("--json", type=Path, default=ROOT / "build" / "scoreboard.json")
    parser.add_argument("--picture", type=Path, default=ROOT / "notebooks" / "images" / "scoreboard.png")
    parser.add_argument("--write-guide", nargs="?", type=Path, const=FIGURES, metavar="PAGE")
    options = parser.parse_args()
    options.json.parent.mkdir(parents=True, exist_ok=True)

    scores = json.loads(options.json.read_text()) if options.json.exists() else {"trials": []}
    if options.repeats or "facts" not in scores:
        scores["facts"] = facts()
        again = {row + BUSY if options.load else row for row in options.rows}
        old = [t for t in scores["trials"] if t["tool"] not in options.only or t["row"] not in again]
        scores["trials"] = old
    for repeat in range(options.repeats):
        for group in [g for g in MEASURES if g in options.rows or (g == "first" and "second" in options.rows)]:
            # Tools take turns, in another order each time, so that a slow minute of the machine falls on all alike.
            for tool in options.only[:: 1 - 2 * (repeat % 2)]:
                if group == "log" and tool != "labkit":
                    continue
                with busy_cores((os.cpu_count() or 1) if options.load else 0):
                    figures = measure(TOOLS[tool], group)
                for row, figure in figures.items():
                    if row in options.rows:
                        kept = row + BUSY if options.load else row
                        scores["trials"].append({"tool": tool, "row": kept, "repeat": repeat, **figure})
                        brief = {key: value for key, value in figure.items() if key not in ("error", "processes")}
                        print(f"{repeat + 1}/{options.repeats} {tool} {row}: {brief}", flush=True)
                options.json.write_text(json.dumps(scores, indent=1))

    print(f"\n{table(scores)}")
    figure = chart(scores)
    options.picture.write_bytes(picture(figure))
    options.json.with_suffix(".html").write_text(figure.to_html())
    if options.write_guide:
        write_between_markers(options.write_guide, table(scores))


if __name__ == "__main__":
    main()
