"""Whether the packages of `make lab` can be had, as wheels only, for systems that are not here. Needs a network.

python -m tests.system.resolves             pip finds a version of each within .ci/ranges.txt
python -m tests.system.resolves --wheels    and PyTorch's wheels have what labkit.system relies on
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from pathlib import Path

from tests.support.repository import ROOT

SYSTEMS = {
    "macOS 11, Apple processor": ("macosx_11_0_arm64", "macosx_11_0_universal2", "macosx_10_9_universal2"),
    "macOS 14, Apple processor": tuple(
        f"macosx_{version}_{processor}"
        for version in ("14_0", "13_0", "12_0", "11_0", "10_15", "10_13", "10_9")
        for processor in ("arm64", "universal2")
    ),
    "Windows": ("win_amd64",),
    "Linux, aarch64": (*(f"manylinux_2_{minor}_aarch64" for minor in range(28, 16, -1)), "manylinux2014_aarch64"),
}
"""The tags of wheels, likely ones first."""

MARKERS = {
    "macOS": {"sys_platform": "darwin", "platform_system": "Darwin", "platform_machine": "arm64", "os_name": "posix"},
    "Windows": {"sys_platform": "win32", "platform_system": "Windows", "platform_machine": "AMD64", "os_name": "nt"},
    "Linux": {"platform_machine": "aarch64"},
}
"""What decides there which packages another needs: of PyTorch's, CUDA's on Linux alone. By a system's first word."""

PIP = """
import json, sys
from pip._internal.cli.main import main
from pip._vendor.packaging import markers
there, here = json.loads(sys.argv.pop(1)), markers.default_environment
markers.default_environment = lambda: {**here(), **there}
sys.exit(main(sys.argv[1:]))
"""
"""pip, which looks for another system's wheels, but would have them need what this system's do."""

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


def pip(command: str, system: str, into: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """Have pip look for wheels for another system."""
    target = [argument for tag in SYSTEMS[system] for argument in ("--platform", tag)]
    markers = json.dumps(MARKERS[re.split(r"\W", system)[0]])
    return subprocess.run(
        [
            *(sys.executable, "-c", PIP, markers, command),
            *("--quiet", "--disable-pip-version-check", "--only-binary=:all:"),
            *("--python-version", PYTHON, "--implementation", "cp", *target),
            *(("--target" if command == "install" else "--dest"), str(into), *more),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def resolve(system: str) -> dict[str, str]:
    """Return the versions that pip takes. Raises AssertionError if it finds none."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        options = ["--dry-run", "--ignore-installed", "--report", str(report), "-c", ".ci/ranges.txt"]
        done = pip("install", system, Path(folder), *options, *needed())
        assert done.returncode == 0, done.stderr[-3000:]
        found = json.loads(report.read_text(encoding="utf-8"))["install"]
    return {each["metadata"]["name"].lower(): each["metadata"]["version"] for each in found}


def wheel_has(system: str, version: str, files: tuple[str, ...]) -> None:
    """Check that PyTorch's wheel for a system has these files."""
    with tempfile.TemporaryDirectory() as folder:
        done = pip("download", system, Path(folder), "--no-deps", f"torch=={version}")
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
    for system in SYSTEMS:
        try:
            versions = resolve(system)
            if wheels and system in RELIES_ON:
                wheel_has(system, versions["torch"], RELIES_ON[system])
        except AssertionError as error:
            failed = True
            print(f"{system}: {error}", flush=True)
        else:
            print(f"{system}: {len(versions)} packages, torch {versions['torch']}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
