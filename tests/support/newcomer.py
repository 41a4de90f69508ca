"""Somebody who has just come to a machine: an ordinary user with an empty home, and what a fresh clone needs of pip.

Nothing is downloaded: pip finds a wheel for every package that is installed here, with its metadata, its programs and
its data, but with a link in place of its modules.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

from tests.support.repository import ROOT, tracked

AS_ROOT = sys.platform == "linux" and os.geteuid() == 0

UID = 12345
"""The number of a user whom no machine knows."""

PYTHON = Path(sys.base_prefix) / "bin"

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["name"]

FOR_DOWNLOADS = re.compile(r"PIP_.*|SSL_CERT_.*|REQUESTS_CA_BUNDLE|(?:HTTPS?|ALL|NO)_PROXY", re.IGNORECASE)
"""The settings of this machine that pip needs to download."""


class Newcomer:
    """Runs commands as an ordinary user whose home is empty; where the tests run as root, one that it makes up.

    Where root keeps Python, or its packages, in a folder that is closed to others, as /root is, this user may read it.
    Nothing is writable that is not writable to any other user.
    """

    def __init__(self, folder: Path, wheels: Path | None, uid: int = UID) -> None:
        """Make a home in this folder. Without a folder of wheels, pip downloads."""
        self._uid = uid
        places = {"HOME": folder / f"home of {uid}", "TMPDIR": folder / f"tmp-{uid}"}
        for place in places.values():
            place.mkdir()
            self.own(place)
        self.home = places["HOME"]
        self._environment = {
            **{name: str(place) for name, place in places.items()},
            **({"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels)} if wheels else _for_downloads()),
            "USER": f"newcomer-{uid}",
            "PATH": os.pathsep.join([str(PYTHON), "/usr/local/bin", "/usr/bin", "/bin"]),
            "LANG": "C.UTF-8",
        }

    def own(self, path: Path) -> None:
        """Give a file or folder, and all below, to this user."""
        if AS_ROOT:
            for each in (path, *path.rglob("*")):
                os.chown(each, self._uid, self._uid, follow_symlinks=False)

    def run(self, command: str, folder: Path, *, timeout_s: float, network: bool = False, **settings: str) -> str:
        """Run a line of shell in a folder, with settings in its environment; return all that it prints.

        Raises AssertionError if it fails. Where the tests run as root, there is no network but loopback.
        """
        argv = ["sh", "-c", command]
        if AS_ROOT:
            argv = ["setpriv", *self._as_user(), *argv]
            if not network:
                argv = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh", *argv]
        done = subprocess.run(
            argv,
            cwd=folder,
            env={**self._environment, **settings},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert done.returncode == 0, f"{command}: exit code {done.returncode}\n{done.stdout}"
        return done.stdout

    def _as_user(self) -> list[str]:
        options = [f"--reuid={self._uid}", f"--regid={self._uid}", "--clear-groups"]
        if all(_is_open(Path(path).resolve()) for path in (sys.base_prefix, sysconfig.get_path("purelib"))):
            return options
        # access(2), by which a shell and make look for programs, heeds a capability only without the "fixup".
        may_read = ("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search")
        return [*options, *may_read, "--securebits=+no_setuid_fixup"]


def _for_downloads() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if FOR_DOWNLOADS.fullmatch(name)}


def _is_open(path: Path) -> bool:
    """Whether other users can look into a folder."""
    return all(each.stat().st_mode & 0o001 for each in (path, *path.parents))


def copy_repository(folder: Path, *, is_clone: bool) -> Path:
    """Copy the repository's files as they are now, as a clone or as an archive, without .git; return the folder."""
    for name in tracked():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    if is_clone:
        for command in (["init", "--quiet"], ["add", "--all"]):
            subprocess.run(["git", *command], cwd=folder, check=True)
    return folder


def write_wheels(folder: Path) -> Path:
    """Write a wheel for every package that is installed here, but labkit; return their folder."""
    folder.mkdir()
    site_packages = sysconfig.get_path("purelib")
    for package in importlib.metadata.distributions(path=[site_packages]):
        if package.name not in (PROJECT, "pip"):
            _write_wheel(folder, package, Path(site_packages))
    return folder


def _write_wheel(folder: Path, package: importlib.metadata.Distribution, site_packages: Path) -> None:
    name = f"{re.sub(r'[-_.]+', '_', package.name)}-{package.version}"
    contents: dict[str, bytes] = {
        f"{name}.dist-info/METADATA": (package.read_text("METADATA") or "").encode(),
        f"{name}.dist-info/entry_points.txt": (package.read_text("entry_points.txt") or "").encode(),
        f"{name}.dist-info/WHEEL": b"Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        # One file for all packages: each writes the same.
        "modules_of_the_tests.pth": f"{site_packages}\n".encode(),
    }
    for file in package.files or ():
        path = Path(os.path.normpath(site_packages / file))
        if path.is_relative_to(site_packages) or not path.is_file():
            continue
        inside = path.relative_to(sys.prefix)
        if inside.parts[0] != "bin":
            contents[f"{name}.data/data/{inside}"] = path.read_bytes()
        elif path.name not in {entry.name for entry in package.entry_points}:
            contents[f"{name}.data/scripts/{path.name}"] = _without_its_python(path.read_bytes())
    record = f"{name}.dist-info/RECORD"
    contents[record] = "".join(f"{path},,\n" for path in [*contents, record]).encode()
    with zipfile.ZipFile(folder / f"{name}-py3-none-any.whl", "w") as wheel:
        for path, content in contents.items():
            wheel.writestr(path, content)


def _without_its_python(program: bytes) -> bytes:
    """Let pip say which Python runs a script."""
    return re.sub(rb"\A#!\S*python\S*", b"#!python", program)
