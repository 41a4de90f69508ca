"""Run the lessons headless with papermill: `python -m tests.tools.run_notebooks --out build/notebooks -p seed 1`.

`make site` makes pages of the executed notebooks. Exits with 1 if a lesson fails.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

import papermill
import yaml

from labkit.system import host
from tests.support import prefork
from tests.tools.course_table import course, write_times

FOLDER = Path(__file__).parents[2] / "notebooks"
LESSONS = sorted(FOLDER.glob("[0-9][0-9]*_*.ipynb"))
LIMIT_BYTES = 400_000
"""Greatest size of an executed notebook: what a code host shows without delay."""


COLD = ("00_start_here", "11_from_a_cell_to_ranks", "17_pitfalls_starting")
"""Lessons about what it takes to start processes: theirs begin as a user's do."""

TRIALS = 3
"""How often a kernel may die as it starts."""

MOST_JOBS = 4
"""Lessons that run at the same time, at most: each has up to four ranks, and memory for them."""


def declared(notebook: Path) -> set[str]:
    """Give the names that the notebook's parameters cell declares."""
    return set(papermill.inspect_notebook(str(notebook)))


def execute(notebook: Path, out: Path, parameters: dict[str, Any] | None = None, cwd: Path = FOLDER) -> Path:
    """Run a notebook into the folder `out`, and give the executed file. Exercises try the reference solutions.

    Its kernel works in `cwd`, where the course lies.

    Raises ValueError for a parameter that the notebook does not declare: papermill would only warn, and test the
    defaults. Raises papermill's error if a cell fails.
    """
    parameters, known = parameters or {}, declared(notebook)
    if unknown := set(parameters) - known:
        raise ValueError(
            f"{notebook.name} declares no parameter {', '.join(sorted(unknown))}; it has {', '.join(sorted(known))}"
        )
    if "answers" in known:
        parameters = {"answers": "solution", **parameters}
    out.mkdir(parents=True, exist_ok=True)
    executed = out / notebook.name
    for trials_left in reversed(range(TRIALS)):
        try:
            papermill.execute_notebook(
                str(notebook),
                str(executed),
                parameters=parameters,
                cwd=str(cwd),
                progress_bar=False,
                start_timeout=120,
                request_save_on_cell_execute=False,  # after every cell; it is at its end, or where it failed
                # Else nbclient waits five seconds and kills it then: ipykernel 7 does not end a kernel before its
                # children, and multiprocessing's resource tracker, one of them, ignores SIGTERM.
                shutdown_kernel="immediate",
            )
            break
        except RuntimeError as error:  # a port that was free may be taken when the kernel comes to it
            if not trials_left or "Kernel died before replying" not in str(error):
                raise
    return executed


class Ran(NamedTuple):
    """How a lesson went."""

    notebook: Path
    took_s: float
    executed: Path | None
    """None: it failed."""
    error: str = ""


def run(notebook: Path, out: Path, parameters: dict[str, Any], is_cold: bool, threads: int) -> Ran:
    """Run a lesson. Its processes begin with torch imported, unless it is to start cold."""
    os.environ["OMP_NUM_THREADS"] = str(threads)
    start = time.monotonic()
    try:
        with prefork.in_use(not is_cold):
            executed = execute(notebook, out, parameters)
    except papermill.PapermillExecutionError as error:
        return Ran(notebook, time.monotonic() - start, None, str(error))
    return Ran(notebook, time.monotonic() - start, executed)


def main() -> int:
    """Run all lessons, the longest first; parameters that a lesson does not declare are left out for it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for executed notebooks")
    parser.add_argument("-p", nargs=2, action="append", default=[], metavar=("NAME", "VALUE"), help="a parameter")
    parser.add_argument(
        "--jobs",
        type=int,
        help="lessons at the same time; by default one more than cores, four at most",
    )
    parser.add_argument(
        "--write-times", action="store_true", help="write into guide/lessons.md how long each took, alone, begun cold"
    )
    parser.add_argument("lessons", nargs="*", type=Path, default=LESSONS, help="notebooks; all by default")
    arguments = parser.parse_args()
    given = {name: yaml.safe_load(value) for name, value in arguments.p}
    known = set().union(*map(declared, arguments.lessons))
    if unknown := set(given) - known:
        parser.error(f"no lesson declares {', '.join(sorted(unknown))}; there are {', '.join(sorted(known))}")
    is_timed = arguments.write_times
    jobs = 1 if is_timed else max(1, arguments.jobs or min(host.cores() + 1, MOST_JOBS))
    long = {lesson.name: float(lesson.runs_in.partition(" ")[0] or 0) for lesson in course()}
    ran = []
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        tasks = []
        for notebook in sorted(arguments.lessons, key=lambda notebook: -long.get(notebook.stem, 0)):
            own = {name: value for name, value in given.items() if name in declared(notebook)}
            is_cold = is_timed or notebook.stem in COLD
            tasks.append(pool.submit(run, notebook, arguments.out, own, is_cold, max(1, host.cores() // jobs)))
        for task in as_completed(tasks):
            one = task.result()
            ran.append(one)
            how = f"FAILED after {one.took_s:.0f} s\n{one.error}"
            if one.executed:
                size_kb = one.executed.stat().st_size / 1e3
                how = f"{one.took_s:.0f} s, {size_kb:.0f} kB, {one.executed}"
            print(f"{one.notebook.name}: {how}", flush=True)
    if is_timed:
        write_times({one.notebook.stem: one.took_s for one in ran if one.executed})
    failed = sorted(one.notebook.name for one in ran if not one.executed)
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
