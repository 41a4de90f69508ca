"""Make the picture of the live view that README shows, from a real run: `python tests/make_picture.py`."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from tests.browser import lab
from tests.run_notebooks import FOLDER

TARGET = FOLDER / "images" / "live_view.png"


def main() -> int:
    """Run lesson 00 with four ranks, and photograph its cell while it runs."""
    with tempfile.TemporaryDirectory(prefix="labkit-") as name:
        folder = Path(name)
        notebook = json.loads((FOLDER / "00_start_here.ipynb").read_text())
        for cell in notebook["cells"]:
            cell["source"] = [
                line.replace("epochs = 15", "epochs = 60").replace("world_size = 2", "world_size = 4")
                for line in cell["source"]
            ]
        (folder / "live.ipynb").write_text(json.dumps(notebook))
        with lab(folder, width=1180, height=1000) as page:
            page.open("live.ipynb")
            page.page.keyboard.press("Escape")
            page.page.keyboard.press("Control+b")  # hide the side bar
            for index in range(3):
                page.run_cell(index)
            page.wait_until_run(2)
            page.run_cell(3)
            page.page.locator(".js-plotly-plot .scatterlayer .trace").first.wait_for(state="attached", timeout=60_000)
            page.page.wait_for_timeout(4000)
            cell = page.cell(3)
            cell.scroll_into_view_if_needed()
            TARGET.parent.mkdir(exist_ok=True)
            cell.screenshot(path=TARGET)
    print(TARGET)
    return 0


if __name__ == "__main__":
    sys.exit(main())
