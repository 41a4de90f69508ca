"""Which tests are run when: `make test` takes a few of each family, `make test-wide` all, `make test-long` hours more.

`make check` is quicker than all of them; what belongs to it is said by markers (pyproject.toml).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

PARAM = type(pytest.param())


def few(cases: Iterable[Any], stay: Callable[[Any], bool] | int) -> list[Any]:
    """Return the parameters of a test; those that do not `stay` in `make test` are marked `wide`.

    Args:
        cases: values, plain tuples of values, or what `pytest.param` has made.
        stay: says of a case whether it stays; or a number n: every n-th case does, the first included.
    """
    found = []
    for index, case in enumerate(cases):
        stays = index % stay == 0 if isinstance(stay, int) else stay(case)
        param = case if isinstance(case, PARAM) else pytest.param(*(case if type(case) is tuple else (case,)))
        found.append(param if stays else param._replace(marks=(*param.marks, pytest.mark.wide)))
    return found
