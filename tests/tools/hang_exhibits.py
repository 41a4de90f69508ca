"""Write every exhibit's card and code into the museum's notebooks: `python tests/tools/hang_exhibits.py`.

An exhibit's file owns both; `tests/lessons/test_pitfalls.py` says when a notebook differs. A new exhibit comes last in
its wing.
"""

from __future__ import annotations

import sys
from pathlib import Path

import nbformat

sys.path.insert(0, str(Path(__file__).parents[2]))  # started by its path, it finds its neighbours too

from tests.tools.run_notebooks import FOLDER  # noqa: E402 isort: skip
from course.pitfalls import WINGS, table  # noqa: E402

AFTER = "scoreboard-title"
"""The cell that follows the exhibits."""


def main() -> int:
    """Replace each exhibit's two cells, or insert them."""
    for wing, name in WINGS.items():
        file = FOLDER / f"{name}.ipynb"
        notebook = nbformat.read(file, as_version=4)
        for exhibit in (each for each in table().values() if each.wing == wing):
            cells = {cell.id: cell for cell in notebook.cells}
            ids = exhibit.name.replace("_", "-"), f"{exhibit.name.replace('_', '-')}-card"
            if ids[0] not in cells:
                new = nbformat.v4.new_markdown_cell(id=ids[1]), nbformat.v4.new_code_cell(id=ids[0])
                place = list(cells).index(AFTER)
                notebook.cells[place:place] = new
                cells.update(zip(reversed(ids), new, strict=True))
            cells[ids[0]].source, cells[ids[1]].source = exhibit.hung, exhibit.card
        nbformat.write(notebook, file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
