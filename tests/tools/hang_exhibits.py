"""Write every exhibit's code into its cell of the museum's notebooks: `python tests/tools/hang_exhibits.py`.

An exhibit's file is where its code is kept; `tests/lessons/test_pitfalls.py` says when a notebook differs.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import nbformat

sys.path.insert(0, str(Path(__file__).parents[2]))  # started by its path, it finds its neighbours too

from tests.tools.run_notebooks import FOLDER  # noqa: E402 isort: skip
from course.pitfalls import WINGS, find  # noqa: E402


def main() -> int:
    """Take the code that follows each card from the exhibit's file."""
    for name in WINGS.values():
        file = FOLDER / f"{name}.ipynb"
        notebook = nbformat.read(file, as_version=4)
        cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
        for card, code in zip(cells, cells[1:], strict=False):
            if shown := re.fullmatch(r'museum\.card\("(\w+)"\)', card.source):
                code.source = find(shown[1]).cell
        nbformat.write(notebook, file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
