"""Run the lessons headless with papermill: `python tests/run_notebooks.py --out build/notebooks -p seed 1`.

Each executed notebook is written beside an HTML page that can be read offline; index.html leads through them. Exits
with 1 if a lesson fails.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import papermill
import yaml

sys.path.insert(0, str(Path(__file__).parent.parent))  # started by its path, it finds its neighbours too

from tests.course_pages import index, page, write_times  # noqa: E402

FOLDER = Path(__file__).parent.parent / "notebooks"
LESSONS = sorted(FOLDER.glob("[0-9][0-9]*_*.ipynb"))
LIMIT_BYTES = 300_000
"""Greatest size of an executed notebook: what a code host shows without delay."""


def declared(notebook: Path) -> set[str]:
    """Give the names that the notebook's parameters cell declares."""
    return set(papermill.inspect_notebook(str(notebook)))


def execute(notebook: Path, out: Path, parameters: dict[str, Any] | None = None) -> Path:
    """Run a notebook into the folder `out`, and give the executed file.

    Raises ValueError for a parameter that the notebook does not declare: papermill would only warn, and test the
    defaults. Raises papermill's error if a cell fails.
    """
    parameters = parameters or {}
    if unknown := set(parameters) - declared(notebook):
        raise ValueError(
            f"{notebook.name} declares no parameter {', '.join(sorted(unknown))}; "
            f"it has {', '.join(sorted(declared(notebook)))}"
        )
    out.mkdir(parents=True, exist_ok=True)
    executed = out / notebook.name
    papermill.execute_notebook(
        str(notebook),
        str(executed),
        parameters=parameters,
        cwd=str(FOLDER),
        progress_bar=False,
        start_timeout=120,
        request_save_on_cell_execute=False,  # all of it, after every cell; it is saved at its end, or where it failed
    )
    return executed


def main() -> int:
    """Run all lessons; parameters that a lesson does not declare are left out for it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for executed notebooks and pages")
    parser.add_argument("-p", nargs=2, action="append", default=[], metavar=("NAME", "VALUE"), help="a parameter")
    parser.add_argument("--write-times", action="store_true", help="write into notebook 00 how long each lesson took")
    parser.add_argument("lessons", nargs="*", type=Path, default=LESSONS, help="notebooks; all by default")
    arguments = parser.parse_args()
    given = {name: yaml.safe_load(value) for name, value in arguments.p}
    known = set().union(*map(declared, arguments.lessons))
    if unknown := set(given) - known:
        parser.error(f"no lesson declares {', '.join(sorted(unknown))}; there are {', '.join(sorted(known))}")
    failed = []
    runs, times = {}, {}
    for notebook in arguments.lessons:
        own = {name: value for name, value in given.items() if name in declared(notebook)}
        start = time.monotonic()
        try:
            executed = execute(notebook, arguments.out, own)
        except papermill.PapermillExecutionError as error:
            failed.append(notebook.name)
            runs[notebook.stem] = "failed when it was last run"
            print(f"{notebook.name}: FAILED after {time.monotonic() - start:.0f} s\n{error}")
            continue
        took_s, size_kb = time.monotonic() - start, executed.stat().st_size / 1e3
        times[notebook.stem] = took_s
        runs[notebook.stem] = f"ran in {took_s:.0f} s"
        print(f"{notebook.name}: {took_s:.0f} s, {size_kb:.0f} kB, {page(executed)}", flush=True)
    print(f"the course: {index(arguments.out, runs)}")
    if arguments.write_times:
        write_times(times)
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
