"""The table of sbatch's options and what `labkit.Slurm` does with each: `python -m tests.tools.make_sbatch_options`.

Made of `sbatch --help` of the version at hand, and of what `labkit.launchers.slurm.options` says of each option.
`tests/launchers/test_slurm_options.py` fails where the table is not current, and where an option has no class yet.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from labkit.launchers.slurm import options

TABLE = Path(__file__).parents[1] / "launchers" / "sbatch_options.txt"

OPTION = re.compile(r"^ {2,8}(?:-\w, *| *-\w +)? *--([a-z][a-z-]+)(\[=[^\]]*\]|=\S+)?", re.MULTILINE)

CONFIGURATION = "ClusterName=none\nSlurmctldHost=localhost\n"
"""Without one sbatch does not even say what options it has; nobody is asked anything."""


def sbatch(argument: str) -> str:
    """Return what `sbatch --help` or `--version` prints here."""
    with tempfile.TemporaryDirectory(prefix="labkit-sbatch-") as folder:
        path = Path(folder) / "slurm.conf"
        path.write_text(CONFIGURATION)
        environment = {**os.environ, "SLURM_CONF": str(path)}
        done = subprocess.run(["sbatch", argument], env=environment, capture_output=True, text=True, check=True)
    return done.stdout


def offered(said: str) -> dict[str, str]:
    """Return the options in what `sbatch --help` says, with how each takes its value: "account" → "=name"."""
    return dict(reversed(OPTION.findall(said)))


def unknown(said: str) -> set[str]:
    """Return the options that `sbatch` has and of which labkit does not say what it does with them."""
    return set(offered(said)) - set(options.classes())


def table(version: str, said: str) -> str:
    """Return the table as text: an option a line, first those of this version."""
    here, classes = offered(said), options.classes()
    lines = [f"{f'--{name}{here[name]}':<44} {classes.get(name, 'NEW: give it a class')}" for name in sorted(here)]
    elsewhere = [f"{f'--{name}':<44} {classes[name]}" for name in sorted(set(classes) - set(here))]
    return "\n".join(
        [
            f"Options of {version}",
            "",
            *lines,
            "",
            "Not in its help: of other versions, or only in the manual",
            "",
            *elsewhere,
            "",
        ]
    )


if __name__ == "__main__":
    help_ = sbatch("--help")
    TABLE.write_text(table(sbatch("--version").strip(), help_), encoding="utf-8")
    if new := unknown(help_):
        sys.exit(f"new: {', '.join(sorted(new))}. Pass them on, or refuse them (labkit/launchers/slurm/options.py)")
