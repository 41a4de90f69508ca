"""How a process is started that finds another system; see `site/labkit_emulation.py` for what that shows."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.support.repository import ROOT

SITE = Path(__file__).parent / "site"

EMULATED = {"darwin": "macOS", "win32": "Windows"}
"""What can be emulated, by Python's name of it."""


def environment(system: str, uvlike: Path | None = None) -> dict[str, str]:
    """Return the environment of a process that finds such a system; "linux" is the one that there is.

    `uvlike` is what `build_uvlike` has made, for a gloo that does not notice a peer's end.
    """
    path = os.pathsep.join(filter(None, [str(SITE), str(ROOT), str(ROOT / "notebooks"), os.environ.get("PYTHONPATH")]))
    found = {**os.environ, "PYTHONPATH": path, "LABKIT_PREFORK": "off"}
    if system != "linux":
        found["LABKIT_EMULATE"] = system
    if uvlike is not None:
        found["LD_PRELOAD"] = str(uvlike)
    return found


def build_uvlike(folder: Path) -> Path:
    """Compile `uvlike.c` into a folder. Raises FileNotFoundError where there is no C compiler."""
    made = folder / "uvlike.so"
    source = Path(__file__).with_name("uvlike.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-o", str(made), str(source), "-ldl", "-lpthread"], check=True)
    return made
