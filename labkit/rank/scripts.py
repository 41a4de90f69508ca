"""A script as the function of a rank: it finds what it finds under `torchrun script.py` or `torchrun -m module`.

`__main__`, `sys.argv` and `sys.path[0]` are its own, and the processes that it starts import it, as Python has it. The
working folder is the notebook's.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
import types
from pathlib import Path
from typing import Any, NamedTuple

from labkit.protocol import modules
from labkit.protocol.packing import MAIN
from labkit.rank import failure, notebook_main
from labkit.rank.script_compat import children

failure.OWN_FILES.add(__file__)


class Script(NamedTuple):
    """A script and its command line."""

    name: str
    """The file, or the module that `python -m` takes."""
    arguments: tuple[str, ...] = ()
    is_module: bool = False

    @property
    def folder(self) -> str:
        """Where Python looks for modules first: the script's folder, or the working folder for `python -m`."""
        return os.getcwd() if self.is_module else os.path.dirname(os.path.realpath(self.name))

    def check(self) -> None:
        """Check that the file or the top-level module is there, and import nothing.

        Raises:
            FileNotFoundError: there is no such file.
            ModuleNotFoundError: there is no such module.
        """
        if not self.is_module:
            if not os.path.isfile(self.name):
                raise FileNotFoundError(f"there is no script {self.name!r} in {os.getcwd()}")
            return
        top = self.name.partition(".")[0]
        if importlib.machinery.PathFinder.find_spec(top, [self.folder, *sys.path]) is None:
            raise ModuleNotFoundError(f"there is no module {top!r} in {self.folder}, nor is it installed")


def run(script: Script) -> None:
    """Run a script as `__main__`. What a rank calls; raises what the script raises.

    This process is that of the script meanwhile. What reserved ranks run next finds it as it was.
    """
    script.check()
    path, imported = list(sys.path), set(sys.modules)
    try:
        sys.path.insert(0, script.folder)
        spec = _spec(script.name) if script.is_module else None
        file = os.path.abspath(script.name) if spec is None else str(spec.origin)
        sys.argv[:] = [file if script.is_module else script.name, *script.arguments]
        main = types.ModuleType(MAIN)
        vars(main).update(__file__=file, __spec__=spec, __package__=spec.parent if spec else None)
        if spec:
            vars(main)["__loader__"] = spec.loader
        with notebook_main.in_place(main), children.sending_by_name():
            exec(compile(Path(file).read_bytes(), file, "exec", dont_inherit=True), vars(main))
    finally:
        sys.path[:] = path
        for name in set(sys.modules) - imported:
            loaded_from = modules.file_of(sys.modules[name])
            if loaded_from is not None and modules.is_user_file(loaded_from):
                del sys.modules[name]  # the next script imports it as it is then


def _spec(module: str) -> Any:
    spec = importlib.util.find_spec(module)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{module}.__main__")
    if spec is None:
        raise ModuleNotFoundError(f"python -m {module} finds no such module, nor a package with a __main__")
    return spec
