"""Whether a job defines what was launched: it is run once, without its last line, in a fresh process.

A definition's source gives what it did only if nothing has changed since: the constant in a default, an attribute of a
class, the decorator of that name. So what the fresh process has is compared with what the notebook has. What differs
is written as it is now, and tried again; what cannot be written so is refused by name.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from labkit.exporting import describe
from labkit.exporting.names import refusal
from labkit.exporting.source import Change, Script
from labkit.protocol.redaction import redact

RUN_S = 300
"""How long a script's definitions may take: its imports, that is."""


def as_launched(
    fn: Callable[..., Any], arguments: dict[str, Any], files_of: Callable[[Script], dict[str, bytes]]
) -> tuple[Script, dict[str, bytes]]:
    """Return a script that defines what `fn` and all that it uses are now, and the files of its folder.

    Raises ValueError that names what no source says.
    """
    changes: dict[Change, Any] = {}
    while True:
        script = Script(fn, arguments, changes)
        files = files_of(script)
        ours = describe.Description(script.bound, script.home, script.rewritten)
        found = describe.differences(ours.nodes, _defined_by(files, script, fn.__name__))
        if not found:
            return script, files
        new: dict[Change, Any] = {}
        for difference in found:
            change = script.change_for(difference, ours.objects)
            if (
                change is not None
                and change[0] not in changes
                and _can_write(fn, arguments, {**changes, **new}, change)
            ):
                new[change[0]] = change[1]
        if not new:
            raise _refusal(fn.__name__, found[0], script)
        changes |= new


def _can_write(
    fn: Callable[..., Any], arguments: dict[str, Any], changes: dict[Change, Any], change: tuple[Change, Any]
) -> bool:
    try:
        Script(fn, arguments, changes | dict([change]))
    except ValueError:
        return False
    return True


def _refusal(title: str, difference: describe.Difference, script: Script) -> ValueError:
    root = difference.path[0].name
    found = f"{difference} is {difference.ours:.80} in the notebook"
    if script.is_constant(root):
        why = (
            f"{found}, and {difference.theirs:.80} once the job's definitions have run: one of them changes it, or "
            f"uses another. Make it inside {title}"
        )
    else:
        why = (
            f"{found}, but its source now gives {difference.theirs:.80}. Run the cell that defines {root!r} again, and "
            f"those that use it; what no cell gives again is made inside {title}"
        )
    return refusal(title, redact(why))


def _defined_by(files: dict[str, bytes], script: Script, title: str) -> list[describe.Node]:
    """Return what a fresh process has after a job's definitions."""
    with tempfile.TemporaryDirectory(prefix="labkit-export-") as folder:
        for name, content in files.items():
            (Path(folder) / name).parent.mkdir(parents=True, exist_ok=True)
            (Path(folder) / name).write_bytes(content)
        request = {"folder": folder, "names": list(script.bound), "rewritten": sorted(script.rewritten)}
        found = in_a_fresh_process(request, script.environment)
    if "error" in found:
        lines = files["train.py"].decode().splitlines()
        where = f" in `{lines[found['line'] - 1].strip()}`" if found.get("line") else ""
        raise refusal(
            title,
            redact(
                f"what it uses cannot be defined in a fresh process: {found['error']}{where}. A job has only what is "
                "written into it; what a definition needs as soon as it runs must be in a cell, a package or the job"
            ),
        )
    return describe.nodes_from(found["nodes"])


def in_a_fresh_process(request: dict[str, Any], environment: dict[str, str]) -> dict[str, Any]:
    """Return what `describe.of_a_script` returns in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-P", describe.__file__],
        input=json.dumps(request),
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    try:
        found: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        said = (done.stderr.strip().splitlines() or ["no word"])[-1]
        return {"error": f"Python ended with exit code {done.returncode}: {said}"}
    return found
