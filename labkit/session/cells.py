"""What a rank of a session does with a cell: run it where the earlier ones ran. Launched like any other function."""

from __future__ import annotations

import ast
import pprint
import sys
import types
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from labkit.protocol.packed import Packed
from labkit.protocol.packing import MAIN, RECEIVED, pack_result, unpack
from labkit.protocol.text import printable
from labkit.rank.failure import OWN_FILES
from labkit.rank.notebook_main import new_main
from labkit.rank.worker import Worker

OWN_FILES.add(__file__)

SHOWN_CHARACTERS = 20_000
"""Of a value; of a longer one the beginning is shown."""


class CellCode(NamedTuple):
    """One cell to run."""

    file: str
    """The name by which tracebacks know the cell."""
    code: str
    wants_value: bool
    """Whether the value of the last expression is to be sent, rather than shown."""
    sent: Packed | None
    """{name: value} from the notebook; None for nothing."""


class Cells(types.ModuleType):
    """The module in which the cells of a session run; of the notebook it has what was sent."""


def take_in(cells: dict[str, Any], sent: Packed, device: torch.device) -> None:
    """Have cells' variables be what the notebook has sent, and under their names the definitions that this needs.

    A function that was sent has global variables of its own: it finds the notebook's, not those of cells.
    """
    brought, received = vars(new_main()), cells[RECEIVED]
    values = unpack(sent, device, brought)
    for name, value in brought[RECEIVED].items():
        if "." in name or name not in cells or received.get(name) is cells[name]:
            received[name] = value
            if "." not in name:
                cells[name] = value
    cells.update(values)


def compile_cell(code: str, file: str) -> tuple[types.CodeType, types.CodeType | None]:
    """Return what is to be executed, and the last expression if there is one to show. Raises SyntaxError."""
    tree = ast.parse(code, file)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) and not _is_silenced(code) else None
    parts = [compile(tree, file, "exec", dont_inherit=True)]
    if isinstance(last, ast.Expr):
        parts.append(compile(ast.Expression(last.value), file, "eval", dont_inherit=True))
    # Not "<module>": that would look like the outermost frame of all where ranks say where they stand.
    body, *value = (part.replace(co_name="<cell>", co_qualname="<cell>") for part in parts)
    return body, next(iter(value), None)


def _is_silenced(code: str) -> bool:
    return code.rstrip().endswith(";")


def join(worker: Worker) -> None:
    """Do nothing, in the cells' process group: to run this joins it."""


def run_cell(worker: Worker, cell: CellCode) -> str | Packed:
    """Run a cell; return the value of its last expression as text ("" for none), or pickled where it is wanted."""
    variables = _cells(worker)
    if cell.sent is not None:
        take_in(variables, cell.sent, worker.device)
    body, last = compile_cell(cell.code, cell.file)
    exec(body, variables)
    value = eval(last, variables) if last else None
    if cell.wants_value:
        return pack_result(value, "the expression gives")
    return "" if value is None else _shown(value)


def _cells(worker: Worker) -> dict[str, Any]:
    """Return the variables of cells, with this cell's worker. The first cell makes them."""
    if not isinstance(cells := sys.modules[MAIN], Cells):
        # The cells' own module, so that their classes can be pickled from rank to rank, too.
        cells = sys.modules[MAIN] = new_main(Cells(MAIN))
        vars(cells).update(rank=worker.rank, world_size=worker.world_size, torch=torch, dist=dist)
    vars(cells)["worker"] = worker
    return vars(cells)


def _shown(value: Any) -> str:
    is_container = isinstance(value, (dict, list, tuple, set))
    text = printable(pprint.pformat(value, sort_dicts=False) if is_container else repr(value))
    left_out = len(text) - SHOWN_CHARACTERS
    return text if left_out <= 0 else f"{text[:SHOWN_CHARACTERS]} … {left_out:,} characters left out"
