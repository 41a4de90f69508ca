"""The house: the public names are what they are said to be."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

import labkit
from tests.support.repository import ROOT

PACKAGE = Path(labkit.__file__).parent


def test_the_public_names_are_those_that_type_checkers_see():
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    seen = sorted(alias.asname or alias.name for node in block.body for alias in node.names)
    assert seen == sorted(labkit.__all__) == sorted([*labkit._HOMES, *labkit._MODULES]) == dir(labkit)


@pytest.mark.parametrize("program", sorted(path.stem for path in (ROOT / "tests" / "benchmarks").glob("[!_]*.py")))
def test_what_measures_can_be_started(program):
    assert importlib.import_module(f"tests.benchmarks.{program}").main
