"""Paths of this machine in a source: where the job runs they may lead nowhere."""

from __future__ import annotations

import ast
from pathlib import Path

EVERYWHERE = ("/dev", "/proc", "/sys")


def paths_of_this_machine(text: str) -> list[str]:
    """Return the absolute paths that a source has and that lead somewhere here, in their order, each once.

    Not those that are defaults of parameters, nor what follows `if __name__ == "__main__"`.
    """
    found: dict[str, None] = {}

    def look(node: ast.AST) -> None:
        if isinstance(node, ast.arguments) or (isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)):
            return
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and _is_here(node.value):
            found[node.value] = None
        for child in ast.iter_child_nodes(node):
            look(child)

    look(ast.parse(text))
    return list(found)


def _is_here(text: str) -> bool:
    """Whether a text is the path of what this machine has, or of what could be made in a folder that it has.

    "/data" alone may be a route or a mount that all machines have; nothing is said of it.
    """
    if len(text) > 4096 or "\n" in text or "\0" in text or text.startswith("//"):
        return False
    try:
        path = Path(text).expanduser()
        if not path.is_absolute() or len(path.parts) < 3 or any(path.is_relative_to(folder) for folder in EVERYWHERE):
            return False
        return path.exists() or path.parent.is_dir()
    except (OSError, RuntimeError):
        return False
