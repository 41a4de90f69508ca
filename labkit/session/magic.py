"""`%%ranks`: run a cell on ranks that stay. Registered by `%load_ext labkit`."""

from __future__ import annotations

import sys
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, cell_magic, line_magic, magics_class, no_var_expand
from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring

from labkit.session.session import Session, newest
from labkit.ui import kernel


@magics_class
class RanksMagics(Magics):
    """The magics `%%ranks` and `%ranks`."""

    def __init__(self, shell: Any) -> None:
        super().__init__(shell)
        self._shell = shell
        self._own: Session | None = None
        """Those that a cell has started; others are a `labkit.Session` of the notebook."""

    @cell_magic("ranks")
    @magic_arguments("%ranks")
    @argument(
        "world_size", nargs="?", type=int, help="number of ranks; by default those that there are, or one per GPU, or 2"
    )
    @argument("--backend", help="of the ranks' process group, nccl or gloo; by default nccl where each has a GPU")
    @argument("--only", metavar="RANKS", help="run on these ranks only: 1, or 0,2")
    @argument("--send", metavar="NAMES", help="give the ranks these of the notebook's variables first: lr,steps")
    @argument("--stall", type=float, metavar="S", help="end the ranks if none has printed, logged or ended for S s")
    @argument("--end", action="store_true", help="end the ranks after this cell; %%ranks --end does it by itself")
    def run_cell(self, line: str, cell: str) -> None:
        """Run the cell on ranks whose variables stay for the next cell.

        They are those of the newest `labkit.Session`; without one, the first use, or another number, starts them. The
        cell finds `worker`, `rank`, `world_size`, `torch` and
        `dist`; what the ranks print is shown with their rank, and so is the value of the last line.
        """
        options = parse_argstring(self.run_cell, line)
        only = None if options.only is None else _ranks(options.only)
        send = {name: self._variable(name) for name in options.send.split(",")} if options.send else None
        session = self._session_of(options.world_size, options.backend)
        try:
            # An empty first line stands for that of the magic, so that line numbers are those of the notebook's cell.
            session.run("\n" + cell, only, options.stall, send, self._title())
        except SyntaxError as error:
            raise error.with_traceback(None) from None  # the line is what matters, not the way here
        finally:
            if options.end:
                session.close()

    @no_var_expand  # braces are the expression's own
    @line_magic("ranks")  # type: ignore[arg-type]
    def evaluate(self, line: str) -> list[Any] | None:
        """Return what an expression is on every rank, by rank: `before = %ranks x`. `%ranks --end` ends the ranks."""
        if line.strip() == "--end":
            self.end()
            return None
        if not line.strip():
            raise UsageError("%ranks takes an expression, such as %ranks x, or --end; a cell begins with %%ranks")
        session = newest()
        if session is None:
            raise UsageError("there are no ranks; start them with a cell that begins with %%ranks")
        try:
            return session.values(line)
        except SyntaxError as error:
            raise error.with_traceback(None) from None

    def end(self) -> None:
        """End the ranks, if there are any."""
        if session := newest():
            session.close()

    def _session_of(self, world_size: int | None, backend: str | None) -> Session:
        """Return the session that was made last; a new one if there is none, or none with these ranks and backend."""
        backend = backend and backend.lower()  # as a session has it
        session = newest()
        if session is not None and world_size in (None, session.world_size) and backend in (None, session.backend):
            return session
        if session is not None and world_size is None:  # only the backend is another
            world_size = session.world_size
        if session is not None and session is self._own:  # of another size, or with another backend
            what, was = (
                (world_size, session.world_size) if world_size != session.world_size else (backend, session.backend)
            )
            print(f"ranks started anew: {what}, in the place of {was}")
            session.close()
        # With no cell of its own: another cell that begins with %%ranks goes on with the same ranks.
        self._own = Session(world_size, backend=backend, is_of_a_cell=False)
        return self._own

    def _title(self) -> str:
        """Return which cell this is, as tracebacks do. IPython counts on before the cell has run."""
        numbers = kernel.cell_numbers()
        frame = sys._getframe()
        while frame.f_back is not None and frame.f_code.co_filename not in numbers:
            frame = frame.f_back
        return kernel.cell_title(numbers.get(frame.f_code.co_filename, self._shell.execution_count))

    def _variable(self, name: str) -> Any:
        try:
            return self._shell.user_ns[name.strip()]
        except KeyError:
            raise UsageError(f"--send: the notebook has no variable {name.strip()!r}") from None


def _ranks(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"--only takes ranks, such as 1 or 0,2; got {text!r}") from None


def load(shell: Any) -> None:
    """Register the magics."""
    shell.register_magics(RanksMagics)


def unload(shell: Any) -> None:
    """End the ranks that cells have started, and take the magics away."""
    if own := shell.magics_manager.registry[RanksMagics.__name__]._own:
        own.close()
    for kind in ("cell", "line"):
        shell.magics_manager.magics[kind].pop("ranks", None)
