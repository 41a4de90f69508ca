"""Try labkit on the system that this is: what a launch needs, and five lessons. Writes what passed, and where.

python -m tests.system.tried --out tried.json
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

from labkit.system import host
from tests.support.repository import ROOT

TRIES = {
    "scenarios": ["-m", "tests.system.scenarios"],
    "engine contract": [
        "-m",
        "pytest",
        "tests/engines/test_engine_contract.py",
        "-k",
        "local or session and not torchrun",
    ],
    "failures": ["-m", "pytest", "tests/failures/test_failures.py"],
    "hangs": ["-m", "pytest", "tests/failures/test_hangs.py"],
    "orphans": ["-m", "pytest", "tests/system/test_guardian.py"],
    **{
        f"lesson {lesson}": ["tests/tools/run_notebooks.py", "--out", "build/tried", f"notebooks/{lesson}.ipynb"]
        for lesson in ("00_start_here", "02_from_a_cell_to_ranks", "03_collectives", "06_ddp", "10_compare")
    },
}

NEEDS_POSIX = {"lesson 02_from_a_cell_to_ranks"}

TRY_S = 1800


def main() -> int:
    """Try each, print how it went, and write it; return 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    out, went = parser.parse_args().out, {}
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "notebooks")])}
    for name, command in TRIES.items():
        if host.lacks_posix and name in NEEDS_POSIX:
            went[name] = f"skipped: {host.lacks_posix}"
        else:
            done = subprocess.run(
                [sys.executable, *command],
                cwd=ROOT,
                env=environment,
                timeout=TRY_S,
                check=False,
            )
            went[name] = "passed" if done.returncode == 0 else f"failed with exit code {done.returncode}"
        print(f"{name}: {went[name]}", flush=True)
    tried = {
        "system": host.name,
        "machine": platform.platform(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
        "missing": {name: text for name, text in host.missing.items() if text},
        "went": went,
    }
    out.write_text(json.dumps(tried, indent=1) + "\n", encoding="utf-8")
    return int(any(how.startswith("failed") for how in went.values()))


if __name__ == "__main__":
    sys.exit(main())
