"""Arguments that are of no use, refused before any process exists: what was found, what is expected, and its page.

`checks` knows each of `labkit.launch`'s; without it, such an argument fails where it is first used.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from labkit.protocol.pages import more

if TYPE_CHECKING:
    from labkit.monitor.companion import Asked


def check(asked: Asked, gpus: int | None) -> None:
    """Raise TypeError or ValueError for what `labkit.launch` cannot do; `gpus` are this machine's, None for others."""
    from labkit.plugins.arguments import checks

    with naming("bad_argument"):
        checks.check(asked, gpus)


@contextlib.contextmanager
def naming(page: str) -> Iterator[None]:
    """Have a TypeError or ValueError that is raised in here name its page, unless it does already."""
    try:
        yield
    except (TypeError, ValueError) as error:
        if "labkit.errors." not in str(error):
            error.args = (f"{error}\n{more(page)}",)
        raise
