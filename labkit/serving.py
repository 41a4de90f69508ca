"""What a rank of a session does: take cells from the notebook, run each where the earlier ones ran, and answer."""

from __future__ import annotations

import ast
import pprint
import sys
import time
import types
from typing import Any, NamedTuple

import cloudpickle
import torch
import torch.distributed as dist

from labkit import records
from labkit.packing import pack_result
from labkit.worker import Cell, Stopped, Worker, describe, show_lines_of

SHOWN_CHARACTERS = 20_000
"""Of a value; of a longer one the beginning is shown."""


class Ask(NamedTuple):
    """One cell to run."""

    file: str
    """The name by which tracebacks know the cell."""
    code: str
    wants_value: bool
    """Whether the value of the last expression is to be sent, rather than shown."""
    sent: bytes
    """{name: value} from the notebook, pickled by value; b"" for nothing."""
    cells: dict[str, Cell]
    """This cell and others that are new, by file name."""


def compile_cell(code: str, file: str) -> tuple[types.CodeType, types.CodeType | None]:
    """Give what is to be executed, and the last expression if there is one to show. Raises SyntaxError."""
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


def serve(worker: Worker) -> None:
    """Run cells until the notebook says "stop". What a session launches; waiting costs no processor time."""
    # The cells' own module, so that their classes can be pickled from rank to rank, too.
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    vars(main).update(worker=worker, rank=worker.rank, world_size=worker.world_size, torch=torch, dist=dist)
    line, known = worker._line, dict[str, Cell]()
    while isinstance(ask := line.words.get(), Ask):
        known.update(ask.cells)
        show_lines_of(ask.cells)
        answer = _run(ask, vars(main), known, worker)
        worker._log.flush()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # before the answer, so that what was printed is seen first
        line.send(answer)


def _run(ask: Ask, variables: dict[str, Any], known: dict[str, Cell], worker: Worker) -> records.Answer:
    rank = worker.rank
    try:
        if ask.sent:
            variables.update(cloudpickle.loads(ask.sent))
        body, last = compile_cell(ask.code, ask.file)
        exec(body, variables)
        value = eval(last, variables) if last else None
        if ask.wants_value:
            return records.Answer(rank, blob=pack_result(value, "the expression gives"))
        return records.Answer(rank, shown="" if value is None else _shown(value))
    except Stopped:
        raise
    except BaseException as error:
        failed_s = time.time() - worker._log._start_s
        if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
            error.__traceback__ = error.__traceback__.tb_next  # without this function
        return records.Answer(rank, failure=records.Failure(rank, failed_s, "running", *describe(error, known)))


def _shown(value: Any) -> str:
    text = pprint.pformat(value, sort_dicts=False) if isinstance(value, (dict, list, tuple, set)) else repr(value)
    left_out = len(text) - SHOWN_CHARACTERS
    return text if left_out <= 0 else f"{text[:SHOWN_CHARACTERS]} … {left_out:,} characters left out"
