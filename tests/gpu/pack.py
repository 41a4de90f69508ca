"""Pack what `make test-gpu` needs where there is a GPU, Python and torch, and no network: one archive, one command.

    python -m tests.gpu.pack build/gpu.tar                here, with a network
    tar xf gpu.tar && sh labkit-gpu/run.sh                there; writes labkit-gpu/build/gpu.md

The archive holds the repository's files and wheels of what they need besides torch. `run.sh` unpacks those, and runs
`python -m tests.gpu` with them in front of the packages that are there.
"""

from __future__ import annotations

import argparse
import io
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

from tests.support.repository import ROOT, tracked

MOST_BYTES = 60 * 2**20
"""Of the archive."""

BESIDES = ("papermill", "pytest", "pytest-timeout", "hypothesis")
"""What the tests need besides labkit's own dependencies."""

LEFT_OUT = (
    *("torch", "nvidia_", "triton", "cuda_"),
    *("debugpy", "widgetsnbextension", "jupyterlab_widgets", "jedi", "parso"),
)
"""Beginnings of names of wheels that are there with torch, or that nothing here imports headless."""

RUN = """#!/bin/sh
# Unpacks the wheels and runs the tests with them before the packages that are there; PYTHON chooses the interpreter. It
# may be that of an environment with torch: one made from it would not see its packages.
cd "$(dirname "$0")" || exit 1
PYTHON=${PYTHON:-python3}
export PYTHONPATH="$PWD:$PWD/build/site${PYTHONPATH:+:$PYTHONPATH}"
export JUPYTER_PATH="$PWD/build/share/jupyter"
"$PYTHON" -c 'import glob, zipfile
for wheel in glob.glob("wheels/*.whl"):
    zipfile.ZipFile(wheel).extractall("build/site")' || exit 1
"$PYTHON" -m ipykernel install --prefix build --name python3 >/dev/null || exit 1
exec "$PYTHON" -m tests.gpu --out build/gpu.md "$@"
"""


def requirements() -> list[str]:
    """Return what is to be downloaded."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    own = [line for line in project["dependencies"] if Requirement(line).name != "torch"]
    return [*own, *BESIDES]


def download(folder: Path, python: str, platforms: list[str]) -> list[Path]:
    """Download wheels for another machine; return those that are to be packed."""
    options = ["--quiet", "--disable-pip-version-check", "--only-binary=:all:", "--implementation", "cp"]
    options += ["--python-version", python, *(f"--platform={platform}" for platform in platforms)]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), *requirements()]
    subprocess.run(command, check=True)
    return [wheel for wheel in sorted(folder.iterdir()) if not wheel.name.lower().startswith(LEFT_OUT)]


def pack(archive: Path, wheels: list[Path]) -> None:
    """Write the archive."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive, "w") as tar:
        for name in tracked():
            tar.add(ROOT / name, f"labkit-gpu/{name}")
        for wheel in wheels:
            tar.add(wheel, f"labkit-gpu/wheels/{wheel.name}")
        script = tarfile.TarInfo("labkit-gpu/run.sh")
        script.size, script.mode = len(RUN.encode()), 0o755
        tar.addfile(script, io.BytesIO(RUN.encode()))


def main() -> None:
    """Download, pack, and say how large it is; exits with 1 if that is too much."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archive", type=Path)
    parser.add_argument("--python", default="3.12", help="version of Python there (default: 3.12)")
    parser.add_argument("--machine", default="x86_64", help="as `uname -m` says there (default: x86_64)")
    arguments = parser.parse_args()
    platforms = [f"manylinux{tag}_{arguments.machine}" for tag in ("_2_28", "_2_27", "_2_24", "_2_17", "2014", "_2_5")]
    with tempfile.TemporaryDirectory() as folder:
        wheels = download(Path(folder), arguments.python, platforms)
        pack(arguments.archive, wheels)
    size = arguments.archive.stat().st_size
    print(f"{arguments.archive}: {size / 2**20:.1f} MiB, {len(wheels)} wheels")
    sys.exit(size > MOST_BYTES)


if __name__ == "__main__":
    main()
