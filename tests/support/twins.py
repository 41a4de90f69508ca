"""The same source as a script under `mp.spawn`, as a script under torchrun, and as a notebook's cell under labkit.

A `Twin` is an idiom: source that defines `main(worker)`, and what its author does when all ranks have ended. `outcome`
runs it one way, in a folder and in processes of its own, and returns what came of it: what each rank returned, the
files, the output, whether it finished. `tests/whole/test_twins.py` has the table, and compares.

    spawn                 a script, whose ranks are started by `torch.multiprocessing.spawn`
    torchrun              the same script under `python -m torch.distributed.run`; there is no parent, so no `after`
    cell, reserved        a cell of a notebook, launched on processes of its own, on reserved ranks (twice)
    run_script            the script for torchrun, by `labkit.run_script`

The notebook is IPython's shell without a kernel: cells, their file names and `__main__` are as in one, at a tenth of
the time.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
import traceback
import types
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.ports import free_ports
from tests.support.repository import ROOT

LONG_S = 120
OWN = ".twin"
"""The folder for what is the harness's own; all else in the working folder is the twin's."""

SCRIPTS = ("spawn", "torchrun")
CELLS = ("cell", "reserved")
UNCHANGED = "run_script"

NOISE = re.compile(r"^ *\d+\.\d s  |\[W\d|^W\d{4} |Warning: |warnings?\.warn|NNPACK|^\s*$|Setting OMP_NUM|^\*+$")
"""Lines of output that are neither the twin's nor compared."""


class Twin(NamedTuple):
    """One idiom, and in what its outcomes may differ."""

    name: str
    source: str
    """Defines `main(worker)`, which returns what JSON can hold. A script's worker has rank, local_rank, world_size,
    device and log."""
    after: str = ""
    """What follows when all ranks have ended: sees `results`; what it prints is compared."""
    joins: bool = True
    """Whether a script's rank has joined its process group when `main` begins, as a cell's has."""
    world_size: int = 2
    repeats: bool = True
    """Whether reserved ranks do it twice; the second outcome counts."""
    refused: str = ""
    """A pattern: labkit refuses to start what a script may do, and says this."""
    args: str = "()"
    """What `main` is called with after the worker: an expression of the script, or of the notebook."""
    files: dict[str, str] = {}
    """Files that lie in the working folder, modules that the source imports, say."""
    leaves_by_chance: tuple[str, ...] = ()
    """Files that are there at the end or not, as it happens, however it runs; they are not compared."""
    arguments: tuple[str, ...] = ()
    """A script's command line."""
    environment: dict[str, str] = {}
    """What a script needs in its environment, as its own launcher sets it."""
    takes: str = "worker"
    """What a script calls `main` with: the worker, or its rank, as `mp.spawn` does."""
    launched: str = "main"
    """What the cell launches: an expression."""
    needs_port: bool = False
    """Whether `FREE_PORT` is to be in its environment, for what has a port of its own."""
    scripts: tuple[str, ...] = SCRIPTS
    """How it runs as a script; cells are compared with the first."""
    cells: tuple[str, ...] = CELLS
    note: str = ""
    """What is to be said of it on the page `COMING_FROM.md`."""

    @property
    def ways(self) -> tuple[str, ...]:
        """All but the one that the others are compared with."""
        unchanged = (UNCHANGED,) if "torchrun" in self.scripts else ()
        return *self.scripts[1:], *unchanged, *self.cells


class Outcome(NamedTuple):
    """What came of a twin, run one way."""

    results: list[Any]
    """By rank; None for one that returned nothing."""
    status: str
    """ "finished", "failed", or "refused": nothing was started."""
    output: list[list[str]]
    """The lines of each rank, sorted."""
    files: list[str]
    """Names of what was written."""
    after: list[str]
    said: str
    """What a failure says; not compared."""

    def compared(self, with_after: bool = True) -> dict[str, Any]:
        """Return what twins must agree on."""
        left_out = {"said"} if with_after else {"said", "after"}
        return {name: value for name, value in self._asdict().items() if name not in left_out}


# The side of the tests


def outcome(twin: Twin, way: str, folder: Path) -> Outcome:
    """Run a twin in a folder that is made for it; raises TimeoutExpired after a while."""
    folder.mkdir()
    (folder / OWN).mkdir()
    for name, text in twin.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    before = _files(folder)
    out = folder / OWN / "driver.out"
    with open(out, "wb") as output:
        code = subprocess.run(
            _command(twin, way, folder),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={
                **os.environ,
                **(twin.environment if way in (*SCRIPTS, UNCHANGED) else {}),
                **({"FREE_PORT": str(free_ports(1)[0])} if twin.needs_port else {}),
                "TWIN": str(folder / OWN),
                # A script finds its modules beside it; here it is the harness that lies beside it.
                "PYTHONPATH": os.pathsep.join(filter(None, (str(folder), str(ROOT), os.environ.get("PYTHONPATH")))),
            },
            timeout=LONG_S,
            check=False,
        ).returncode
    written = sorted(_files(folder) - before - set(twin.leaves_by_chance))
    said = out.read_text(errors="replace")
    after = _lines(_read(folder, "after"))
    if way in (*SCRIPTS, UNCHANGED):
        results = [json.loads(_read(folder, f"result-{rank}") or "null") for rank in range(twin.world_size)]
        output_lines = [_lines(_read(folder, f"out-{rank}")) for rank in range(twin.world_size)]
        return Outcome(results, "failed" if code else "finished", output_lines, written, after, said)
    assert code == 0, said
    told = json.loads(_read(folder, "told"))
    lines = [_lines(text) for text in told["output"]]
    return Outcome(told["results"], told["status"], lines, written, after, told["said"])


def own_folder() -> Path:
    """Return the harness's folder, in the processes of a twin, which may change theirs."""
    return Path(os.environ["TWIN"])


def _files(folder: Path) -> set[str]:
    found = {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}
    return {str(path) for path in found if path.parts[0] != OWN and "__pycache__" not in path.parts}


def _read(folder: Path, name: str) -> str:
    path = folder / OWN / name
    return path.read_text(errors="replace") if path.exists() else ""


def _lines(text: str) -> list[str]:
    text = re.sub(r"^.*Warning: .*\n  .*\n", "", text, flags=re.MULTILINE)  # with the line that it is about
    return sorted(line for line in text.splitlines() if not NOISE.search(line))


SPAWNS = """
if __name__ == "__main__":
    import tests.support.twins
    results = tests.support.twins.spawned(main, {world_size}, {joins}, {takes!r}, {args})
    with tests.support.twins.after_all():
        exec(compile({after!r}, "<after>", "exec"))
"""
IS_A_RANK = """
if __name__ == "__main__":
    import tests.support.twins
    tests.support.twins.be_a_rank(main, {joins}, {takes!r}, {args})
"""


def _command(twin: Twin, way: str, folder: Path) -> list[str]:
    if way in (*SCRIPTS, UNCHANGED):
        tail = SPAWNS if way == "spawn" else IS_A_RANK
        script = folder / OWN / "twins" / "script.py"  # by this word, tests.support.prefork knows it
        script.parent.mkdir()
        script.write_text(twin.source + tail.format(**twin._asdict()))
        start = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={twin.world_size}"]
        agent = [] if way == "spawn" else [*start, f"--log-dir={folder / OWN / 'agent'}"]
        if way == UNCHANGED:
            agent = ["-m", "tests.support.twins", UNCHANGED, str(twin.world_size)]
        return [sys.executable, *agent, str(script), *twin.arguments]
    (folder / OWN / "twin.json").write_text(json.dumps(twin._asdict()))
    return [sys.executable, "-m", "tests.support.twins", way]


# The side of scripts


def spawned(main: Any, world_size: int, joins: bool, takes: str, args: tuple[Any, ...]) -> list[Any]:
    """Call `main` as `mp.spawn` does on its ranks; return their results. Raises what `mp.spawn` raises."""
    import torch.multiprocessing as mp

    mp.spawn(_spawned_rank, (main, world_size, free_ports(1)[0], joins, takes, args), nprocs=world_size)
    return [json.loads(_read(own_folder().parent, f"result-{rank}") or "null") for rank in range(world_size)]


def _spawned_rank(
    rank: int, main: Any, world_size: int, port: int, joins: bool, takes: str, args: tuple[Any, ...]
) -> None:
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ.update({name: str(number) for name, number in numbers.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    be_a_rank(main, joins, takes, args)


def be_a_rank(main: Any, joins: bool, takes: str, args: tuple[Any, ...]) -> None:
    """Call `main` as the rank that the environment says."""
    import torch
    import torch.distributed as dist

    rank, local_rank, world_size = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    own = own_folder()
    output = os.open(own / f"out-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    torch.manual_seed(rank)  # as labkit's seed=0
    worker = types.SimpleNamespace(
        rank=rank, local_rank=local_rank, world_size=world_size, device=torch.device("cpu"), log=lambda **_: None
    )
    if joins:
        dist.init_process_group("gloo")
        dist.barrier()  # all have joined, as when a cell's function begins
    result = main(rank if takes == "rank" else worker, *args)
    (own / f"result-{rank}").write_text(json.dumps(result))
    if dist.is_initialized():
        dist.destroy_process_group()


@contextlib.contextmanager
def after_all() -> Any:
    """Keep what is printed, to be compared."""
    kept = io.StringIO()
    own = own_folder()
    with contextlib.redirect_stdout(kept):
        yield
    (own / "after").write_text(kept.getvalue())


# The side of cells


def notebook(way: str) -> None:
    """Be the notebook: run the source as a cell, launch `main`, and tell what came of it."""
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Application, Config

    folder = Path.cwd()
    twin = Twin(**json.loads((own_folder() / "twin.json").read_text()))
    sys.path[0] = str(folder)  # as in a notebook that lies there
    sys.argv = [str(folder / "ipykernel_launcher.py"), "-f", "kernel.json"]
    config = Config()
    config.HistoryManager.hist_file = ":memory:"
    config.InteractiveShell.colors = "NoColor"
    application = Application()
    application.argv = sys.argv[1:]
    shell = InteractiveShell.instance(config=config, parent=application)
    told = {"results": [None] * twin.world_size, "status": "refused", "output": [""] * twin.world_size, "said": ""}
    try:
        _cell(shell, twin.source)
        _launch(shell, twin, way, told)
        if twin.after and told["status"] == "finished":
            shell.user_ns["results"] = told["results"]
            with after_all():
                _cell(shell, twin.after)
    finally:
        (folder / OWN / "told").write_text(json.dumps(told))
        shell.history_manager.end_session()


def run_script(world_size: int, file: str, *arguments: str) -> None:
    """Run a script for torchrun by `labkit.run_script`; end as torchrun ends."""
    import labkit

    sys.path[0] = str(Path.cwd())
    sys.argv[:] = ["ipykernel_launcher.py"]
    run = labkit.run_script(file, *arguments, world_size=world_size, wait=False, live=False)
    assert run.over.wait(LONG_S), run.stacks()
    print(run.error or "finished")
    sys.exit(int(run.error is not None))


def _cell(shell: Any, text: str) -> None:
    shell.run_cell(text, store_history=True).raise_error()


def _launch(shell: Any, twin: Twin, way: str, told: dict[str, Any]) -> None:
    import labkit

    main = eval(twin.launched, shell.user_ns)
    with contextlib.ExitStack() as open_until_the_end:
        on: Any = None
        if way == "reserved":
            on = open_until_the_end.enter_context(labkit.Session(twin.world_size))
        for _ in range(1 + (way == "reserved" and twin.repeats)):
            try:
                args = eval(twin.args, shell.user_ns)
                run = labkit.launch(main, *args, world_size=twin.world_size, on=on, wait=False, live=False)
            except (TypeError, ValueError, RuntimeError):
                told["said"] = traceback.format_exc()
                return
            assert run.over.wait(LONG_S), run.stacks()
            told["status"] = "finished" if run.error is None else "failed"
            told["said"] = str(run.error or "")
            told["results"] = run.results
            told["output"] = [run.output[rank] for rank in range(twin.world_size)]
            if run.error is not None:
                return


if __name__ == "__main__":
    if sys.argv[1] == UNCHANGED:
        run_script(int(sys.argv[2]), *sys.argv[3:])
    else:
        notebook(sys.argv[1])
