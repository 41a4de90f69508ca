"""The lessons' pictures: each is there, small, and made from what the lesson showed. No process."""

from __future__ import annotations

import base64
import io

import nbformat
import pytest
from PIL import Image

from tests.tools import make_picture
from tests.tools.run_notebooks import LESSONS

PICTURES = sorted(make_picture.PICTURES.glob("*.png"))


def executed(tmp_path, *sizes):
    """An executed lesson that has shown pictures of these sizes."""
    cells = [nbformat.v4.new_code_cell("first = 1")]
    for size in sizes:
        file = io.BytesIO()
        Image.effect_noise(size, 80).convert("RGB").save(file, "PNG")
        data = {"image/png": base64.b64encode(file.getvalue()).decode(), "text/plain": "<Chart>"}
        cells.append(nbformat.v4.new_code_cell("chart", outputs=[nbformat.v4.new_output("display_data", data)]))
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "06_ddp.ipynb")
    return tmp_path / "06_ddp.ipynb"


def test_every_lesson_has_a_small_picture():
    assert [picture.stem for picture in PICTURES] == [lesson.stem for lesson in LESSONS]
    sizes = {picture.name: picture.stat().st_size for picture in PICTURES}
    assert max(sizes.values()) <= make_picture.LIMIT_BYTES, sizes
    assert sum(sizes.values()) <= 800_000


def test_the_first_chart_is_taken_and_made_small(tmp_path):
    picture = make_picture.first_chart(executed(tmp_path, (900, 600), (800, 300)))
    assert picture.size == (900, 600)
    small = make_picture.small_png(picture)
    assert len(small) <= 2 * make_picture.LIMIT_BYTES, "even noise, which no chart is"
    assert Image.open(io.BytesIO(small)).size == (480, 320)
    with pytest.raises(ValueError, match="06_ddp.ipynb shows no chart; run the lesson again"):
        make_picture.first_chart(executed(tmp_path))


def test_a_lesson_that_has_changed_is_run_again(tmp_path):
    ran = executed(tmp_path, (90, 60))
    (tmp_path / "now").mkdir()
    lesson = tmp_path / "now" / ran.name
    notebook = nbformat.read(ran, as_version=4)
    nbformat.write(notebook, lesson)
    assert make_picture.is_new(ran, lesson)
    notebook.cells[0].source = "first = 2"
    nbformat.write(notebook, lesson)
    assert not make_picture.is_new(ran, lesson)
    assert not make_picture.is_new(tmp_path / "07_model_parallel.ipynb", lesson)
