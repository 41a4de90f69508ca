"""Make the pictures of README and of the site from real runs.

`python -m tests.tools.make_picture` photographs the live view: lesson 00 with four ranks, in a browser, while it runs.

`python -m tests.tools.make_picture 04_ddp` takes the first chart of a lesson, or of several, small, for the site's
table of lessons, from build/notebooks, where `make notebooks` has run them. Plotly draws it, for which it wants `pip
install kaleido` and a Chrome.
"""

from __future__ import annotations

import argparse
import io
import json
import tempfile
from pathlib import Path

import nbformat
import plotly.io
from PIL import Image

from tests.tools.make_site import PLOTLY
from tests.tools.run_notebooks import FOLDER

EXECUTED = FOLDER.parent / "build" / "notebooks"
LIVE_VIEW = FOLDER / "images" / "live_view.png"
PICTURES = FOLDER / "images" / "lessons"

WIDTH = 480
"""Pixels of a lesson's picture: it is shown half as wide, and a screen with fine pixels needs twice as many."""
COLORS = 64
LIMIT_BYTES = 60_000


def live_view() -> Path:
    """Run lesson 00 with four ranks, and photograph its cell while it runs."""
    from tests.support.browser import lab

    with tempfile.TemporaryDirectory(prefix="labkit-") as name:
        folder = Path(name)
        text = (FOLDER / "00_start_here.ipynb").read_text()
        text = text.replace("epochs = 15", "epochs = 60").replace("world_size = 2", "world_size = 4")
        sources = ["".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
        launch = next(index for index, source in enumerate(sources) if "run = labkit.launch(" in source)
        (folder / "live.ipynb").write_text(text)
        with lab(folder, width=1180, height=1000) as page:
            page.open("live.ipynb")
            page.page.keyboard.press("Escape")
            page.page.keyboard.press("Control+b")  # hide the side bar
            for index in range(launch):
                page.run_cell(index)
            page.wait_until_run(launch - 1, timeout_s=400)
            page.run_cell(launch)
            page.page.locator(".labkit-run [role=figure]").first.wait_for(timeout=180_000)
            page.page.wait_for_timeout(4000)
            cell = page.cell(launch)
            cell.scroll_into_view_if_needed()
            cell.screenshot(path=LIVE_VIEW)
    return LIVE_VIEW


def first_chart(executed: Path) -> Image.Image:
    """Return a picture of the first chart that an executed lesson shows. Raises ValueError if there is none."""
    for cell in nbformat.read(executed, as_version=4).cells:
        for output in cell.get("outputs", []):
            if figure := output.get("data", {}).get(PLOTLY):
                figure.pop("config", None)
                height = figure["layout"].get("height", 360)
                blob = plotly.io.to_image(figure, "png", width=760, height=height, validate=False)
                return Image.open(io.BytesIO(blob)).convert("RGB")
    raise ValueError(f"{executed} shows no chart; run the lesson again (make notebooks)")


def small_png(picture: Image.Image) -> bytes:
    """Return a picture as PNG, `WIDTH` wide, with few colours."""
    size = (WIDTH, round(picture.height * WIDTH / picture.width))
    small = picture.resize(size, Image.Resampling.LANCZOS)
    file = io.BytesIO()
    small.quantize(COLORS, dither=Image.Dither.NONE).save(file, "PNG", optimize=True)
    return file.getvalue()


def lesson_picture(name: str) -> Path:
    """Make the picture of a lesson that lies executed."""
    picture = PICTURES / f"{name}.png"
    picture.write_bytes(small_png(first_chart(EXECUTED / f"{name}.ipynb")))
    return picture


def main() -> None:
    """Make what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lessons", nargs="*", metavar="LESSON")
    lessons = parser.parse_args().lessons
    for picture in map(lesson_picture, lessons) if lessons else [live_view()]:
        print(f"{picture.relative_to(FOLDER.parent)}: {picture.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
