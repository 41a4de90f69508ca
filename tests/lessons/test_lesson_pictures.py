"""The lessons' pictures: each is there, small, and made from what the lesson showed. No process."""

from __future__ import annotations

from tests.tools import make_picture
from tests.tools.run_notebooks import LESSONS

PICTURES = sorted(make_picture.PICTURES.glob("*.png"))


def test_every_lesson_has_a_small_picture():
    assert [picture.stem for picture in PICTURES] == [lesson.stem for lesson in LESSONS]
    sizes = {picture.name: picture.stat().st_size for picture in PICTURES}
    assert max(sizes.values()) <= make_picture.LIMIT_BYTES, sizes
    assert sum(sizes.values()) <= 800_000
