"""What lies on the disk: the folders of checkpoints, and files that are written through and have checksums."""

from __future__ import annotations

import hashlib
import json
import os
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from labkit.system import host

FORMAT = "labkit checkpoint 1"
NAME = re.compile(r"checkpoint-(\d{6,})")
UNFINISHED = re.compile(r"\.checkpoint-\d{6,}(\.[0-9a-f]{8})?\.(writing|removing)")
"""What a killed run may leave behind; the next one removes it."""

MANIFEST = "manifest.json"


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; what was saved before is as it was."""

    def __str__(self) -> str:
        # The pages do not travel with an exported training.
        page = '\nWhat to do: help("labkit.failures.pages.checkpoint")' if find_spec("labkit.failures.pages") else ""
        return f"{self.args[0]}{page}"


def folders(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, whole or not, oldest first."""
    return sorted((path for path in folder.glob("checkpoint-*") if NAME.fullmatch(path.name)), key=number)


def number(path: Path) -> int:
    """Return the number in the name of a checkpoint's folder."""
    return int(path.name.rpartition("-")[2])


def verified(path: Path) -> dict[str, Any]:
    """Return a checkpoint's manifest. Raises CheckpointError unless every file is as it was written."""
    if not path.is_dir():
        what = "is a file" if path.exists() else "does not exist"
        raise CheckpointError(f"{path} {what}; a checkpoint of labkit is a folder with a {MANIFEST}")
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{path} is not a checkpoint of labkit: there is no {MANIFEST} in it") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path / MANIFEST} is truncated or damaged: {error}") from error
    found = manifest.get("format") if isinstance(manifest, dict) else None
    if found != FORMAT:
        raise CheckpointError(f"{path / MANIFEST} says format {found!r}; this version of labkit reads {FORMAT!r}")
    if manifest.pop("sha256", None) != checksum_of(manifest):
        raise CheckpointError(f"{path / MANIFEST} is damaged: it does not match its own checksum")
    if "progress" in manifest:
        manifest["progress"] = _from_json(manifest["progress"])
    for name, facts in manifest["files"].items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"{file} is missing")
        if (size := file.stat().st_size) != facts["bytes"]:
            raise CheckpointError(f"{file} has {size:,} bytes of the {facts['bytes']:,} that were written")
        if (sha256 := facts_of(file)["sha256"]) != facts["sha256"]:
            raise CheckpointError(
                f"{file} is damaged: its SHA-256 is {sha256[:12]}…, written was {facts['sha256'][:12]}…"
            )
    return manifest


ITEMS = "labkit:items"
"""Stands in JSON for a dict whose keys are not all texts, which JSON does not have: {ITEMS: [[key, value], …]}."""


def as_json(value: Any, where: str) -> Any:
    """Return a plain value as JSON has it. Raises TypeError that names what it does not have."""
    if isinstance(value, dict):
        if odd := [key for key in value if type(key) not in (str, int, float, bool, type(None))]:
            raise TypeError(f"{where} has the key {odd[0]!r}; keys are texts or numbers")
        inside = "save({}=…)" if where == "save" else f"{where}.{{}}"
        items = {key: as_json(item, inside.format(key)) for key, item in value.items()}
        is_plain = all(type(key) is str for key in items) and items.keys() != {ITEMS}
        return items if is_plain else {ITEMS: [list(item) for item in items.items()]}
    if isinstance(value, (list, tuple)):
        return [as_json(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if value is None or isinstance(value, (str, int, float)):
        return value
    raise TypeError(f"{where} is a {type(value).__name__}; save takes plain numbers, texts, lists and dicts")


def _from_json(value: Any) -> Any:
    if isinstance(value, dict):
        if value.keys() == {ITEMS}:
            return {key: _from_json(item) for key, item in value[ITEMS]}
        return {key: _from_json(item) for key, item in value.items()}
    return [_from_json(item) for item in value] if isinstance(value, list) else value


def checksum_of(manifest: dict[str, Any]) -> str:
    """Return the SHA-256 that a manifest says of itself."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def facts_of(path: Path) -> dict[str, Any]:
    """Return a file's size and SHA-256, as they are in the manifest."""
    with open(path, "rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def write_tensors(path: Path, value: Any) -> dict[str, dict[str, Any]]:
    """Write a value by `torch.save`, to the disk itself; give {file name: its size and SHA-256}."""
    with open(path, "wb") as file:
        checked = _Checked(file)
        try:
            torch.save(value, checked)  # type: ignore[arg-type]
        except Exception as error:
            raise checked.error or error from None
        file.flush()
        os.fsync(file.fileno())
    return {path.name: checked.facts()}


class _Checked:
    """A file that remembers what it was given to write, so that what arrived can be compared with it."""

    def __init__(self, file: Any) -> None:
        self._file, self._sha, self._bytes = file, hashlib.sha256(), 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            self._file.write(data)
        except OSError as error:
            self.error = error  # torch.save raises another one
            raise
        self._sha.update(data)
        self._bytes += len(data)
        return len(data)

    def flush(self) -> None:
        pass

    def facts(self) -> dict[str, Any]:
        return {"bytes": self._bytes, "sha256": self._sha.hexdigest()}


def sync_folder(folder: Path) -> None:
    """Let what happened in a folder reach the disk."""
    host.sync_folder(folder)
