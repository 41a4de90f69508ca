"""Write a function from a cell to a folder that trains without a notebook: a script, a batch script, requirements.

`export` starts at the function and follows every name that its code uses. What a cell defines is written as source;
what a package has is imported; numbers, texts and collections of them become assignments; anything else is refused by
name. The result is tried in a fresh process (`rehearsal`), and nothing is written before it defines what was launched.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import importlib.metadata
import importlib.util
import inspect
import json
import os
import sys
import textwrap
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import labkit
from labkit.engines.arguments import check_first_parameter, naming
from labkit.exporting.imports import check_origin, imported, local_file, local_modules
from labkit.exporting.paths import paths_of_this_machine
from labkit.exporting.rehearsal import as_launched
from labkit.exporting.secrets import lines_with_secrets
from labkit.exporting.source import Script
from labkit.launchers import slurm
from labkit.launchers.old_slurm.target import Slurm
from labkit.protocol.redaction import redact
from labkit.rank.worker import takes_worker

DISTRIBUTION = "labkit-torch"
"""What this package is installed as; on the package index "labkit" is another."""

MARK = ".labkit-export.json"
"""Lists what `export` wrote into a folder, with checksums: only that is ever replaced."""

PACKAGE = Path(labkit.__file__).parent

RANK_SIDE = {"protocol", "system", "rank", "checkpoint"}
RANK_SIDE_MODULES = {
    *("launchers", "launchers.environments", "launchers.job_events", "launchers.rank_entry", "launchers.tcp_store"),
    "launchers.run_directory",
    *(f"launchers.run_directory.{name}" for name in ("directory", "files", "private", "records", "sender")),
    *("exporting", "exporting.script"),
    *("comparison", "comparison.program"),
    *("trace", "trace.intervals", "trace.profiling"),
}
"""Folders and modules of labkit that a rank may need; the others are the notebook's."""


def export(
    fn: Callable[..., Any],
    folder: str | os.PathLike[str],
    /,
    *,
    on: Slurm | None = None,
    seed: int | None = 0,
    **arguments: Any,
) -> Path:
    """Write a folder that trains as `launch(fn, …)` does, with no notebook and no Jupyter. Return its path.

    >>> labkit.export(train, "job/", epochs=90)

    The folder holds `train.py` (the function and all that it uses, as source), `job.sbatch`, `submit_ray.py` for a Ray
    cluster, `requirements.txt` with the versions installed here, `README.txt` with the commands, and in `labkit/` what
    a rank needs of this package; modules and packages of your own lie beside them, of a package what is used, with the
    data in its folders. It can be copied anywhere. With as many ranks, and as many threads on each, it ends
    with the notebook's weights.

    The function's parameters become options of the script: `torchrun … train.py --epochs 3`, `sbatch job.sbatch -e 3`.

    Args:
        fn: a function, as `labkit.launch` takes it.
        folder: made if missing. What an earlier export wrote there is replaced; anything else stays.
        on: what `job.sbatch` asks for, and how many ranks `submit_ray.py` starts; by default one node with two ranks.
        seed: as `launch` takes it.
        arguments: for `fn`, as `launch` passes them on; what an option gives replaces them.

    Secrets are not written: for what is one by its name or by how it looks (a token, a password in an address) the
    script reads a variable of the environment, and a warning says which.

    Raises ValueError that names what cannot be written as source, or a file in the folder that is not export's own;
    TypeError for an argument that `fn` does not take.
    """
    with naming("cannot_be_exported"):
        given: Any = fn
        if isinstance(given, functools.partial) and not given.args:
            fn, arguments = given.func, {**given.keywords, **arguments}
        _check(fn, on, seed, arguments)
        if on is not None:  # a job of torchrun's or srun's own, written as before
            kept = {name.replace("-", "_"): value for name, value in on.options.items()}
            on = Slurm(on.nodes, on.ranks_per_node, setup=on.setup, python=on.python, **kept)
        on = on or Slurm(nodes=1, ranks_per_node=2)
        script, files = as_launched(fn, arguments, lambda script: _files(script, fn.__name__, seed, on))
        written = _write(Path(folder), files)
    _warn_of_secrets(script.environment, files)
    _warn_of_paths(files)
    return written


OURS = {"submit_ray.py", "requirements.txt", "README.txt", "job.sbatch"}
"""Files of a job that are not from the notebook; besides those in `labkit/`."""


def _files(script: Script, title: str, seed: int | None, on: Slurm) -> dict[str, bytes]:
    """Return the files of a job, by name."""
    text = script.text(seed)
    copied, data = _local_files(text, title)
    files = {
        "train.py": text.encode(),
        "job.sbatch": _batch_script(on, title).encode(),
        "submit_ray.py": _ray_script(on).encode(),
        **{name: content.encode() for name, content in copied.items()},
        **data,
        **_carried([text, *copied.values()], title),
    }
    # What runs on Ray needs Ray, which is there.
    sources = [text.decode() for name, text in files.items() if name.endswith(".py") and name != "submit_ray.py"]
    files["requirements.txt"] = _requirements(sources).encode()
    files["README.txt"] = _readme(title, list(script.environment), {*copied, *data}).encode()
    return files


def _warn_of_secrets(environment: Collection[str], files: dict[str, bytes]) -> None:
    if environment:
        warnings.warn(
            f"train.py does not have the secrets that the notebook has; it reads {', '.join(environment)} from the "
            "environment. README.txt says how to set " + ("it" if len(environment) == 1 else "them"),
            stacklevel=3,
        )
    for name, text in _readers_texts(files):
        if name == "train.py":
            continue
        if name.endswith(".py"):
            found = lines_with_secrets(text)
        else:
            found = [number for number, line in enumerate(text.splitlines(), 1) if redact(line) != line]
        if found:
            where = f"line{'s' * (len(found) > 1)} {', '.join(map(str, found))}"
            warnings.warn(f"{name}, copied as it is, has what looks like a secret in {where}", stacklevel=3)


def _warn_of_paths(files: dict[str, bytes]) -> None:
    """Warn of paths of this machine in the reader's code; a parameter's default is an option of the script."""
    for name, text in _readers_texts(files):
        if name.endswith(".py") and (found := paths_of_this_machine(text)):
            warnings.warn(
                f"{name} names what is on this machine: {', '.join(found)}. Where the job runs there may be nothing: "
                "take it as a parameter of the function, which is an option of the job",
                stacklevel=3,
            )


def _readers_texts(files: dict[str, bytes]) -> Iterator[tuple[str, str]]:
    """Yield the files of a job that come from the reader and are text."""
    for name, content in files.items():
        if name not in OURS and not name.startswith("labkit/"):
            with contextlib.suppress(UnicodeDecodeError):
                yield name, content.decode()


def _check(fn: Any, on: Any, seed: Any, arguments: dict[str, Any]) -> None:
    title = getattr(fn, "__name__", type(fn).__name__)
    if not inspect.isfunction(fn):
        raise TypeError(f"export() takes a function written with def, got a {type(fn).__name__}: {fn!r:.80}")
    if fn.__name__ == "<lambda>":
        raise TypeError("export() takes a function written with def, got a lambda; give it a name")
    if inspect.iscoroutinefunction(fn):
        raise TypeError(f"{title} is an async function; export() takes an ordinary one (def, not async def)")
    if on is not None and not isinstance(on, (Slurm, slurm.Slurm)):
        raise TypeError(f"on is labkit.Slurm(…), what job.sbatch asks for, got {on!r:.80}")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise TypeError(f"seed is a whole number or None, got {seed!r}")
    signature = inspect.signature(fn)
    check_first_parameter(title, signature)
    parameters = list(signature.parameters.values())
    for name, value in {"on": on, "seed": seed}.items():
        if value and name in signature.parameters:
            raise ValueError(
                f"{title} has a parameter called {name!r}, but export() keeps {name}=… for itself. Rename it in "
                f"{title}, or bind it: functools.partial({title}, {name}=…)"
            )
    worker = [None] if takes_worker(fn, (), arguments) else []
    by_place = [p.name for p in parameters[len(worker) :] if p.kind is p.POSITIONAL_ONLY]
    if by_place:
        raise TypeError(f"{title} takes {by_place[0]!r} by position only; options are passed by name")
    try:
        signature.bind_partial(*worker, **arguments)
    except TypeError as error:
        raise TypeError(
            f"{title}{signature} cannot be called as {title}(worker, {', '.join(f'{k}=…' for k in arguments)}): {error}"
        ) from None


MOST_DATA_BYTES = 32 << 20
"""Of the files that are no Python in the folders of the reader's packages."""


def _local_files(text: str, title: str) -> tuple[dict[str, str], dict[str, bytes]]:
    """Return the reader's own modules that the script imports, and those that they import: {file name: text}.

    And what else lies in the folders of those that are packages: {file name: content}. Raises ValueError where that
    is more than `MOST_DATA_BYTES`.
    """
    files: dict[str, str] = {}
    data: dict[str, bytes] = {}
    todo = [text]
    while todo:
        for name in sorted(imported(todo.pop())):
            top = name.partition(".")[0]
            if (place := local_file(top)) is None:
                continue
            check_origin(top, f"{title} cannot be exported: it imports")
            if top == "train":
                raise ValueError(
                    f"{title} cannot be exported: it imports {place}, but the script is called train.py too"
                )
            for _, file in local_modules(name):
                inside = str(file.relative_to(place.parent))
                if inside in files:
                    continue
                files[inside] = file.read_text(encoding="utf-8")
                todo.append(files[inside])
                if file.name == "__init__.py":
                    data |= {str(each.relative_to(place.parent)): each.read_bytes() for each in _data_of(file.parent)}
    return files, data


def _data_of(package: Path) -> list[Path]:
    """Return the files of a package that are no modules, its subpackages' excluded. Raises ValueError for too many."""
    found = [file for file in files_in(package, subpackages=False) if file.suffix not in (".py", ".pyc")]
    if (size := sum(file.stat().st_size for file in found)) > MOST_DATA_BYTES:
        raise ValueError(
            f"the package {package} holds {size >> 20:,} MiB of other files, too many to copy (the most is "
            f"{MOST_DATA_BYTES >> 20} MiB). Keep data elsewhere, and pass the path as an argument"
        )
    return found


def _carried(texts: list[str], title: str) -> dict[str, bytes]:
    """Return the files of labkit that the script needs, below `labkit/`."""
    by_name = "labkit.rank.script_compat.fork_server"  # which a fork server imports, as `children` there tells it to
    init = (PACKAGE / "__init__.py").read_bytes()
    at_once = {node.module or "" for node in ast.parse(init).body if isinstance(node, ast.ImportFrom)}
    needed = {"labkit.exporting.script", by_name, *(name for name in at_once if name.startswith("labkit."))}
    needed = needed.union(*(_labkit_modules(text) for text in texts))
    todo, files = sorted(needed), {"labkit/__init__.py": init}
    while todo:
        module = todo.pop().removeprefix("labkit.")
        folder, _, _ = module.partition(".")
        if module not in RANK_SIDE_MODULES and folder not in RANK_SIDE:
            raise ValueError(
                f"{title} cannot be exported: it uses labkit.{module}, which is of the notebook and not of the ranks"
            )
        path = PACKAGE / module.replace(".", "/")
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        name = f"labkit/{path.relative_to(PACKAGE).as_posix()}"
        if name in files:
            continue
        files[name] = path.read_bytes()
        todo += sorted(_labkit_modules(files[name].decode()))
        if "." in module:
            todo.append(f"labkit.{module.rpartition('.')[0]}")
    if licence := _licence():
        files["labkit/LICENSE"] = licence.read_bytes()
    return files


def _licence() -> Path | None:
    """Return the licence of this package: beside it in a clone, else as it was installed."""
    if (PACKAGE.parent / "pyproject.toml").exists():
        return PACKAGE.parent / "LICENSE"
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        for file in importlib.metadata.files(DISTRIBUTION) or []:
            if file.name == "LICENSE":
                return Path(str(file.locate()))
    return None


def _labkit_modules(text: str) -> set[str]:
    """Return the modules of labkit that a source uses, by import or as `labkit.Checkpoint`."""
    found = set()
    for name in imported(text):
        top, _, rest = name.partition(".")
        if top != "labkit" or not rest:
            continue
        first = rest.partition(".")[0]
        rest = labkit._HOMES.get(first) or labkit._MODULES.get(first, first) + rest.removeprefix(first)
        while rest and not any((PACKAGE / rest.replace(".", "/")).with_suffix(s).exists() for s in ("", ".py")):
            rest = rest.rpartition(".")[0]
        if rest:
            found.add(f"labkit.{rest}")
    return found


# What lies beside the script


def _requirements(sources: Iterable[str]) -> str:
    """Return requirements.txt: what the files in the folder import, as it is installed here."""
    providers = importlib.metadata.packages_distributions()
    tops = {name.partition(".")[0] for text in sources for name in imported(text)}
    tops.add("numpy")  # torch hands tensors to it without asking for it
    lines = {
        f"{name}=={importlib.metadata.version(name).partition('+')[0]}"
        for top in tops - set(sys.stdlib_module_names) - {"labkit"}
        for name in providers.get(top, [])
    }
    head = f"# What train.py and labkit/ import, as it was installed; Python {sys.version.split()[0]}.\n"
    local = sorted(f"{name} {v}" for name in ("torch", "torchvision") if "+" in (v := _version(name)))
    head += f"# The builds were: {', '.join(local)}.\n" if local else ""
    return head + "\n".join(sorted(lines)) + "\n"


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _batch_script(on: Slurm, name: str) -> str:
    python = "python" if on.python == sys.executable else on.python
    script = on.script([python, "train.py"], name, "slurm-%j.out").rstrip("\n")
    head, _, command = script.rpartition("\n")
    # So that `sbatch --ntasks-per-node=2 job.sbatch` starts two.
    per_node = '--ntasks-per-node="$SLURM_NTASKS_PER_NODE"'
    command = command.replace(f"--ntasks-per-node={on.ranks_per_node}", per_node, 1)
    where = 'test -f train.py || { echo "submit this in the folder of train.py" >&2; exit 66; }'
    return f'{head}\n{where}\n{command} "$@"\n'


def _ray_script(on: Slurm) -> str:
    text = (PACKAGE / "exporting" / "submit_ray.py").read_text(encoding="utf-8")
    return text.replace("\nWORLD_SIZE = 2\n", f"\nWORLD_SIZE = {on.world_size}\n", 1)


def _readme(title: str, environment: list[str], own: set[str]) -> str:
    packages = {name.partition("/")[0] + "/" * ("/" in name) for name in own}
    listed = "\n".join(f"{name:<17} yours, as it is beside the notebook" for name in sorted(packages))
    usage = _usage(title)
    if listed:
        usage = usage.replace("\nlabkit/ ", f"\n{listed}\nlabkit/ ", 1)
    return usage + (_secrets(environment) if environment else "")


def _secrets(environment: list[str]) -> str:
    quoted = ", ".join(f'"{name}": "…"' for name in environment)
    return textwrap.dedent(f"""
        Secrets of the notebook are not in this folder. The script reads them from the environment:

            export {" ".join(f"{name}=…" for name in environment)}

        sbatch and torchrun pass them on; for Ray:

            ray job submit --runtime-env-json '{{"env_vars": {{{quoted}}}}}' …
        """)


def _usage(title: str) -> str:
    return textwrap.dedent(f"""\
        {title}, exported from a notebook by labkit {labkit.__version__}
        {"=" * (len(title) + len(labkit.__version__) + 37)}

        train.py          the function and what it uses
        labkit/           what a rank needs of labkit (BSD-3-Clause)
        job.sbatch        for SLURM
        submit_ray.py     for Ray
        requirements.txt  packages, with the versions that the notebook had

        Install, in this folder:

            python -m venv .venv && . .venv/bin/activate && pip install -r requirements.txt

        Run on one machine, with two ranks; with one rank, python train.py:

            torchrun --standalone --nproc-per-node=2 train.py

        On several machines, the same line on each; HOST is one of them, the port a free one there:

            TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes=2 --nproc-per-node=2 \\
                --rdzv-backend=c10d --rdzv-endpoint=HOST:29400 --rdzv-id=1 train.py

        On a SLURM cluster, from this folder, which all nodes must see:

            sbatch job.sbatch

        On a Ray cluster, whose nodes need see no common folder, but have the packages:

            ray job submit --address http://HOST:8265 --working-dir . -- python submit_ray.py

        Options of the function: python train.py --help. They work everywhere: sbatch job.sbatch --seed 1; for Ray,
        after two dashes: python submit_ray.py --world-size 4 -- --seed 1

        What a run was asked for is in log/*/options.json: arguments, seed, threads, ranks. What ranks log is in
        log/*/rank-*.jsonl, a line per call (pandas.read_json(…, lines=True)); what the function returned in
        log/*/result-*.pt (torch.load).

        The weights are those of the notebook, bit for bit, with as many ranks and as many threads on each (--threads)
        on the same kind of processor, as far as the training itself is deterministic.
        """)


# Writing


def _write(folder: Path, files: dict[str, bytes]) -> Path:
    """Write the files, in place of those of an earlier export. Raises ValueError rather than replace another file."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; export() needs a folder")
    sums = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    before = _earlier(folder)
    for name in sorted({*files, *before}):
        there = folder / name
        if not there.exists():
            continue
        if name not in before:
            raise ValueError(f"{there} is there already and was not written by export(); give another folder")
        if hashlib.sha256(there.read_bytes()).hexdigest() not in (before[name], sums.get(name)):
            raise ValueError(f"{there} has been changed since it was exported; rename it, or give another folder")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARK).write_text(json.dumps({"labkit": labkit.__version__, "files": sums}, indent=1), encoding="utf-8")
    for name in before.keys() - files.keys():
        (folder / name).unlink(missing_ok=True)
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def _earlier(folder: Path) -> dict[str, str]:
    """Return what an earlier export wrote there, by name, with checksums."""
    if not folder.exists():
        return {}
    if not (folder / MARK).exists():
        others = sorted(p.name for p in folder.iterdir())
        if others:
            raise ValueError(
                f"{folder} is not empty ({', '.join(others[:3])}{', …' if len(others) > 3 else ''}) and was not "
                "written by export(); give a new folder"
            )
        return {}
    found: dict[str, str] = json.loads((folder / MARK).read_text(encoding="utf-8"))["files"]
    return found


def files_in(package: Path, subpackages: bool = True) -> Iterator[Path]:
    """Yield the files in a package's folder, with or without those of packages inside it; none that are hidden."""
    for folder, folders, names in os.walk(package):
        inside = [each for each in folders if each[0] != "." and each != "__pycache__"]
        folders[:] = [each for each in inside if subpackages or not Path(folder, each, "__init__.py").exists()]
        yield from (Path(folder, name) for name in names if name[0] != ".")
