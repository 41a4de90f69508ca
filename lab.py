"""Set up labkit and open its lessons: what `make lab` and `make test` call, for machines with and without make.

    python lab.py [options of jupyter lab]    set up .venv if needed, open JupyterLab on the first notebook
    python lab.py test [options of pytest]    set up .venv if needed, run the tests
    python lab.py set-up [lab|test]           set up .venv if needed
    python lab.py run …                       run .venv's Python

In the environment: TORCH=cpu or TORCH=cuda says which build of PyTorch to take on Linux. By default it is the one for
CPUs, a tenth of the other, where there is no NVIDIA driver and PyTorch's own index of such builds can be reached.

Any Python runs this as far as the line which says that it is too old.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
BIN = VENV / "bin"
PYTHON = os.environ.get("PYTHON") or sys.executable
"""Makes the environment."""

OLDEST = (3, 11)

CPU_BUILDS = "https://download.pytorch.org/whl/cpu"
REACHED_S = 5.0
"""How long that index may take to answer."""

RANGES = {"lab": ".ci/ranges.txt", "test": ".ci/constraints.txt"}
"""Lessons take the newest version of each package that was tried and that this system has; tests, that very one."""

DOWNLOADS = {
    ("lab", "cuda"): "3.2 GB",
    ("lab", "cpu"): "0.4 GB",
    ("test", "cuda"): "3.4 GB",
    ("test", "cpu"): "0.6 GB",
}

COMPILES_ALL = ("-m", "compileall", "-qq", "-j", "0", str(VENV / "lib"))
COMPILES_WHAT_LESSONS_IMPORT = (
    "-c",
    "import jupyterlab.labapp, labkit.ui.charts, papermill, torchvision, labkit.rank.first_step; "
    "labkit.rank.first_step.warm_up()",
)
"""Otherwise each of several ranks that start together would compile them."""


def main(arguments: list[str]) -> int:
    """Do as the command line says; return the exit code."""
    if arguments[:1] in (["-h"], ["--help"]):
        print(__doc__)
        return 0
    what, *options = arguments if arguments and not arguments[0].startswith("-") else ["lab", *arguments]
    if what not in ("lab", "test", "set-up", "run"):
        sys.exit(f"{what!r} is neither lab, test, set-up nor run\n\n{__doc__}")
    if what == "run":
        return call(program("python"), *options)
    if what == "set-up":
        if options not in ([], ["lab"], ["test"]):
            sys.exit(f"set-up takes lab or test, not {' '.join(options)!r}\n\n{__doc__}")
        set_up(*(options or ["test"]))
        return 0
    set_up(what)
    if what == "lab":
        return jupyter(options + shlex.split(os.environ.get("LAB_OPTIONS", "")))
    return pytest(options + shlex.split(os.environ.get("PYTEST_OPTIONS", "")))


def jupyter(options: list[str]) -> int:
    """Open JupyterLab on the first notebook, until it is ended."""
    as_root = ["--allow-root"] if os.geteuid() == 0 else []  # as in a container
    page = "--LabApp.default_url=/lab/tree/00_start_here.ipynb"
    return call(program("jupyter"), "lab", "--ip=127.0.0.1", "--notebook-dir=notebooks", page, *as_root, *options)


def pytest(options: list[str]) -> int:
    """Run the tests, several at a time."""
    python = program("python")
    call(python, "-m", "compileall", "-q", "labkit", "notebooks/course", "tests")  # once, not in a thousand processes
    workers = os.environ.get("WORKERS") or str(min(4, 2 + (os.cpu_count() or 1)))
    by_file = ["--numprocesses", workers, "--dist", "loadfile", "--no-loadscope-reorder"]
    return call(python, "-m", "pytest", *by_file, *options)


def program(name: str) -> str:
    """Return the path of a program of the environment."""
    return str(BIN / name)


def call(*command: str) -> int:
    """Run a program here; return its exit code. An interrupt is the program's to answer."""
    process = subprocess.Popen(command, cwd=ROOT)
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            continue


# The environment


def set_up(what: str) -> None:
    """Make .venv, with what lessons need, or all that tests need, unless it is there."""
    constraints = ROOT / RANGES[what]
    newest_s = max(path.stat().st_mtime for path in (ROOT / "pyproject.toml", constraints))
    has_pip = answers()
    for done in [what] if what == "test" else ["lab", "test"]:  # tests need all that lessons need
        ready = VENV / f"ready-{done}"
        if has_pip and ready.exists() and ready.stat().st_mtime >= newest_s:
            return
    if why := unsupported():
        sys.exit(why)
    if not has_pip:
        make_venv()
    torch, options, remark = which_torch()
    print(f"{remark}; downloads about {DOWNLOADS[what, torch]}, once, and takes some minutes", flush=True)
    install = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile", "-c", RANGES[what]]
    if code := call(program("python"), *install, *options, "-e", f".[{what}]"):
        sys.exit(code)
    # pip would compile every installed module, most of which no lesson imports.
    call(program("python"), *(COMPILES_ALL if what == "test" else COMPILES_WHAT_LESSONS_IMPORT))
    (VENV / f"ready-{what}").touch()


def answers() -> bool:
    """Whether the environment counts: its pip answers.

    It does not where python3-venv was missing when it was made, or where the clone has got another name since: programs
    in an environment know their Python by its whole path.
    """
    try:
        return subprocess.run([program("pip"), "--version"], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def make_venv() -> None:
    """Make the environment, with pip."""
    print(f"making {VENV.name}", flush=True)
    shutil.rmtree(VENV, ignore_errors=True)
    if call(PYTHON, "-m", "venv", str(VENV)) or not answers():
        shutil.rmtree(VENV, ignore_errors=True)
        sys.exit(f"{PYTHON} cannot make an environment with pip; on Debian and Ubuntu: sudo apt install python3-venv")


def unsupported() -> str:
    """Return why PyTorch, or labkit, cannot be installed with this Python on this machine; "" if they can."""
    if sys.platform == "win32":
        return "labkit runs on Linux and macOS. On Windows, use WSL2 (wsl --install), with a clone there"
    if sys.version_info < OLDEST:
        newer = "make PYTHON=python3.12, or python3.12 lab.py"
        return f"labkit needs Python 3.11 or newer, this is {platform.python_version()}; try {newer}"
    if "musl" in str(sysconfig.get_config_var("HOST_GNU_TYPE")):
        return "PyTorch has no wheels for musl (Alpine Linux): use a system with glibc, the image python:3.12-slim, say"
    if sys.platform == "darwin" and platform.machine() == "x86_64":
        return "PyTorch has no wheels newer than 2.2 for Macs with Intel processors, and labkit needs 2.8"
    return ""


def which_torch() -> tuple[str, list[str], str]:
    """Return which build of PyTorch is taken, pip's options for that, and why, in words."""
    asked = os.environ.get("TORCH", "")
    if asked not in ("", "cpu", "cuda"):
        sys.exit(f"TORCH is cpu or cuda, got {asked!r}")
    if sys.platform != "linux":
        return "cpu", [], "PyTorch for this system computes on CPUs"
    from_there = ["--extra-index-url", CPU_BUILDS]
    if asked:
        return asked, from_there if asked == "cpu" else [], f"PyTorch for {asked}, as TORCH says"
    if has_nvidia():
        return "cuda", [], "PyTorch for CUDA: there is an NVIDIA driver"
    if "PIP_NO_INDEX" not in os.environ and is_reached():
        return "cpu", from_there, "PyTorch for CPUs: there is no NVIDIA driver (TORCH=cuda takes the other)"
    return "cuda", [], f"PyTorch with CUDA, as the smaller build, for CPUs, cannot be reached ({CPU_BUILDS})"


def has_nvidia() -> bool:
    """Whether there is an NVIDIA driver."""
    return os.path.exists("/proc/driver/nvidia/version") or shutil.which("nvidia-smi") is not None


def is_reached() -> bool:
    """Whether PyTorch's index of builds for CPUs answers."""
    try:
        with urllib.request.urlopen(f"{CPU_BUILDS}/torch/", timeout=REACHED_S) as answer:
            return answer.status == 200
    except (OSError, ValueError):
        return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
