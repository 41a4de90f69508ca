"""Whether the packages of `make lab` can be had, as wheels only, for systems that are not here. Needs a network.

python -m tests.system.resolves             pip finds a version of each within .ci/ranges.txt
python -m tests.system.resolves --wheels    and PyTorch's wheels have what labkit.system relies on
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from pathlib import Path

from tests.support.repository import ROOT

SYSTEMS = {
    "macOS 11, Apple processor": ("macosx_11_0_arm64",),
    "macOS 14, Apple processor": ("macosx_14_0_arm64", "macosx_13_0_arm64", "macosx_12_0_arm64", "macosx_11_0_arm64"),
    "Windows": ("win_amd64",),
    "Linux, aarch64": ("manylinux_2_28_aarch64", "manylinux_2_17_aarch64", "manylinux2014_aarch64"),
}
"""The tags of wheels, likely ones first."""

PYTHON = "3.12"

RELIES_ON = {
    "macOS 11, Apple processor": ("torch/lib/libomp.dylib", "torch/lib/libtorch_cpu.dylib"),
    "Windows": ("torch/lib/torch_cpu.dll", "torch/lib/libiomp5md.dll"),
}
"""Files of PyTorch's wheels: LLVM's OpenMP (or Intel's), which KMP_BLOCKTIME speaks to."""


def needed() -> list[str]:
    """Return what `make lab` installs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [*project["dependencies"], *project["optional-dependencies"]["lab"]]


def pip(command: str, tags: tuple[str, ...], into: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """Have pip look for wheels for another system."""
    target = [argument for tag in tags for argument in ("--platform", tag)]
    return subprocess.run(
        [
            *(sys.executable, "-m", "pip", command, "--quiet", "--disable-pip-version-check", "--only-binary=:all:"),
            *("--python-version", PYTHON, "--implementation", "cp", *target),
            *(("--target" if command == "install" else "--dest"), str(into), *more),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def resolve(tags: tuple[str, ...]) -> dict[str, str]:
    """Return the versions that pip takes. Raises AssertionError if it finds none."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        options = ["--dry-run", "--ignore-installed", "--report", str(report), "-c", ".ci/ranges.txt"]
        done = pip("install", tags, Path(folder), *options, *needed())
        assert done.returncode == 0, done.stderr[-3000:]
        found = json.loads(report.read_text(encoding="utf-8"))["install"]
    return {each["metadata"]["name"].lower(): each["metadata"]["version"] for each in found}


def wheel_has(tags: tuple[str, ...], version: str, files: tuple[str, ...]) -> None:
    """Check that PyTorch's wheel for a system has these files."""
    with tempfile.TemporaryDirectory() as folder:
        done = pip("download", tags, Path(folder), "--no-deps", f"torch=={version}")
        assert done.returncode == 0, done.stderr[-3000:]
        (wheel,) = Path(folder).glob("torch-*.whl")
        with zipfile.ZipFile(wheel) as file:
            missing = set(files) - set(file.namelist())
    assert not missing, f"torch {version} has no {sorted(missing)}: what labkit.system sets for it means nothing"


def main() -> int:
    """Print what was found for each system; return 1 if one cannot have labkit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--wheels", action="store_true", help="download PyTorch's wheels and look into them")
    wheels, failed = parser.parse_args().wheels, False
    for system, tags in SYSTEMS.items():
        try:
            versions = resolve(tags)
            if wheels and system in RELIES_ON:
                wheel_has(tags, versions["torch"], RELIES_ON[system])
        except AssertionError as error:
            failed = True
            print(f"{system}: {error}", flush=True)
        else:
            print(f"{system}: {len(versions)} packages, torch {versions['torch']}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
