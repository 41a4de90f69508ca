"""Measure lesson 10's functions on GPUs, and keep the figures where the lesson shows them to machines without.

The cells are the notebook's own, up to the one that compares. Each rank needs a GPU.

    python -m tests.benchmarks.gpus --width 8192 --batch-size 512
"""

from __future__ import annotations

import argparse
import datetime
import sys
from pathlib import Path
from typing import Any

import nbformat
import torch

from course.recorded import COMMAND, Recorded, add

FOLDER = Path(__file__).parents[2] / "notebooks"
FILE = FOLDER / "recorded" / "compare.json"
COLUMNS = ("ranks", "difference", "device step ms", "communication ms", "waiting ms", "formula KiB", "peak_mib")
"""Of a comparison's table, what is kept."""


def cells(parameters: dict[str, Any]) -> list[str]:
    """Return the lesson's code up to the cell that compares, with these parameters in place of the notebook's."""
    found = []
    for cell in nbformat.read(FOLDER / "10_compare.ipynb", as_version=4).cells:
        if cell.cell_type == "code":
            found.append(cell.source)
            if "parameters" in cell.metadata.get("tags", []):
                found.append("\n".join(f"{name} = {value!r}" for name, value in parameters.items()))
            if "labkit.compare(" in cell.source:
                return found
    raise ValueError("lesson 10 has no cell with labkit.compare(…)")


def rows_of(frame: Any) -> dict[str, dict[str, float | None]]:
    """Return the rows to keep of a comparison's table; NaN, which JSON has not, becomes None."""
    kept = frame.reindex(columns=COLUMNS)
    return {
        str(title): {name: None if value != value else float(value) for name, value in row.items()}
        for title, row in kept.iterrows()
    }


def main() -> int:
    """Measure, write and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=8192, help="of the network's layers")
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--ranks", type=int, default=2, help="of DDP; model parallel has two")
    options = parser.parse_args()
    gpus = torch.cuda.device_count()
    if gpus < max(2, options.ranks):
        print(f"found {gpus} GPUs, but each of {max(2, options.ranks)} ranks needs one; nothing was recorded")
        return 1
    given = {"width": options.width, "batch_size": options.batch_size, "world_size": options.ranks, "steps": 30}
    # In this module's own names, so that functions are sent to the ranks as those of a notebook are.
    for source in cells(given):
        exec(compile(source, "lesson 10", "exec"), globals())
    cuda, nccl = torch.version.cuda, ".".join(map(str, torch.cuda.nccl.version()))
    add(
        FILE,
        {
            "hardware": f"{gpus} × {torch.cuda.get_device_name(0)}",
            "versions": f"torch {torch.__version__}, CUDA {cuda}, NCCL {nccl}",
            "command": f"{COMMAND} --width {options.width} --batch-size {options.batch_size} --ranks {options.ranks}",
            "recorded": datetime.date.today().isoformat(),
            "rows": rows_of(globals()["comparison"].frame()),
        },
    )
    print(Recorded(FILE))
    return 0


if __name__ == "__main__":
    sys.exit(main())
