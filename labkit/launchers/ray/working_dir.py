"""What of the notebook's folder goes to Ray's nodes, with `runtime_env={"working_dir": "."}`, and how much that is.

Ray packs the folder, and sends the package unless it has one with the same content. Each launch changes the folder: it
makes a run's folder there, and JupyterLab saves the notebook. What ranks need of it is not among that.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

NOT_SENT = (
    *("labkit-runs", "*.ipynb", ".ipynb_checkpoints", ".git", "__pycache__", "*.pyc", ".venv", "venv", "node_modules"),
    *(".mypy_cache", ".pytest_cache", ".ruff_cache", "wandb", "mlruns", "mlflow.db", "lightning_logs"),
)
"""As .gitignore has it, anywhere below the folder. `{"excludes": ["!wandb"]}` sends it nevertheless."""

RUN = "/[0-9][0-9][0-9][0-9][0-9][0-9][0-9][0-9]-[0-9][0-9][0-9][0-9][0-9][0-9]-*-????"
"""Matches a run's folder, as `new_directory` names it, where runs lie in the folder itself."""

MB = 1e6


def without_runs(runtime_env: Mapping[str, Any], runs: Path) -> dict[str, Any]:
    """Return a runtime environment of whose working folder the runs' folders, and the like, are not sent."""
    found = dict(runtime_env)
    if (folder := local_folder(found)) is None:
        return found
    excludes = [*NOT_SENT]
    with contextlib.suppress(ValueError):
        within = runs.resolve().relative_to(folder).as_posix()
        excludes.append(RUN if within == "." else f"/{within}")
    return found | {"excludes": [*excludes, *found.get("excludes", [])]}


def local_folder(runtime_env: Mapping[str, Any]) -> Path | None:
    """Return the working folder that Ray is to send; None if it is none of this machine's."""
    given = runtime_env.get("working_dir")
    if not isinstance(given, (str, os.PathLike)) or "://" in os.fspath(given) or not os.path.isdir(given):
        return None
    return Path(given).resolve()


def size_in_words(runtime_env: Mapping[str, Any]) -> str:
    """Return how much Ray is to send, and what most of it is; "" if it sends none, or this version does not say."""
    if (folder := local_folder(runtime_env)) is None:
        return ""
    sizes: Counter[str] = Counter()

    def add(path: Path) -> None:
        if path.is_file():
            sizes[path.relative_to(folder).parts[0]] += path.stat().st_size

    try:
        from ray._private.runtime_env import packaging

        excludes = [packaging._get_excludes(folder, [*runtime_env.get("excludes", [])])]
        packaging._dir_travel(folder, excludes, add, include_gitignore=True)
    except Exception:  # not public
        return ""
    largest, most = max(sizes.items(), key=lambda item: item[1], default=("", 0))
    share = f", of which {largest} has {most / MB:,.1f} MB" if most > MB and len(sizes) > 1 else ""
    return f"{sum(sizes.values()) / MB:,.1f} MB of {folder} come along{share}"
