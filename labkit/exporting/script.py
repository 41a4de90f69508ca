"""What starts a function that `labkit.export` has written to a script: under torchrun, under srun, or alone.

Runs in the rank's own process, in place of the notebook: `rank.main` does what it does there, with the same seeds and
threads. What the rank logs goes to a file, what it does to the terminal of rank 0.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import faulthandler
import inspect
import io
import json
import os
import pickle
import sys
import time
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from labkit.protocol import events
from labkit.protocol.job import Job, RankInfo
from labkit.protocol.pickling import Message, loads
from labkit.protocol.redaction import shown
from labkit.rank import script_compat
from labkit.rank.channels import Channel
from labkit.rank.main import RankTask, do_and_exit
from labkit.rank.worker import takes_worker

SAY_EVERY_S = 5.0
"""Time between two lines of rank 0 on what was logged."""

Scalar = bool | int | float | str | Path


def main(function: Callable[..., Any], arguments: dict[str, Any], seed: int | None = 0) -> typing.NoReturn:
    """Call the function as the rank that this process is, with options from the command line; then exit.

    `arguments` are those that the notebook gave; the function's own defaults stand for the rest.
    """
    chosen, seed, threads = options(function, arguments, seed).parse(sys.argv[1:])

    def prepare() -> Callable[[], RankTask | None]:
        script_compat.begin()
        faulthandler.enable()
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        here = Path(sys.modules["__main__"].__file__ or "").absolute().parent
        info = rank_info_here()
        plain = {name: shown(name, _as_json(value)) for name, value in chosen.items()}
        asked = {"function": function.__name__, "arguments": plain, "seed": seed, "threads": threads}
        channel = ScriptChannel(info, here / "log", asked)
        job = Job(
            function=Message(pickle.dumps((function, (), chosen)), []),
            world_size=info.world_size,
            backend=None,
            cuda_devices=None,
            threads=threads,
            seed=seed,
            port=0,
            start_s=time.time(),
            environment={},
            cells={},
            takes_worker=takes_worker(function, (), arguments),
            argv=tuple(sys.argv[:1]),  # what follows has been given to the function
        )
        return lambda: RankTask(job, info, channel, lambda job, info: channel.meet())

    do_and_exit(prepare)


def rank_info_here() -> RankInfo:
    """Return which rank this process is: as torchrun or srun has it, or else the only one."""
    if "TORCHELASTIC_RUN_ID" in os.environ or "SLURM_STEP_NUM_TASKS" in os.environ:
        from labkit.launchers import rank_entry
        from labkit.rank import die_with_parent  # noqa: F401 - from here on, this process ends with its launcher

        return rank_entry.rank_info_here()
    if "RANK" in os.environ:
        raise RuntimeError("RANK is set, but not by torchrun or srun; start this script with one of them, or without")
    return RankInfo(0, 0, 1, 1)


class ScriptChannel(Channel):
    """The channel of a rank that no notebook watches: its records go to files below `log`, and some to the terminal.

    log/20261120-174400-2-ranks/options.json    by rank 0: function, arguments, seed, threads, and how many ranks
    log/20261120-174400-2-ranks/rank-0.jsonl    a line per log call: {"rank": …, "step": …, "time_s": …, "loss": …}
    log/20261120-174400-2-ranks/result-0.pt     what the function returned, as `torch.load` reads it
    """

    def __init__(self, info: RankInfo, log: Path, asked: dict[str, Any]) -> None:
        super().__init__()
        self._info, self._log, self._asked = info, log, asked
        self._folder: Path | None = None
        self._file: io.TextIOWrapper | None = None
        self._attempt = int(os.environ.get("SLURM_RESTART_COUNT", 0))
        self._steps = 0
        self._said_s = self._began_s = time.monotonic()

    def meet(self) -> dist.Store:
        """Return the store through which the ranks meet, once all know where they log."""
        from labkit.launchers import rank_entry

        info = self._info
        self._log.mkdir(exist_ok=True)
        if info.world_size == 1:
            store: dist.Store = dist.HashStore()
        else:
            from labkit.launchers.run_directory import directory as run_directory

            store = rank_entry.rendezvous(info, run_directory.RunDirectory(self._log), self._attempt)
        if info.rank == 0:
            store.set("labkit/log", self._new_folder().name)
        self._folder = self._log / store.get("labkit/log").decode()
        self._folder.mkdir(exist_ok=True)  # on another machine than rank 0's, which need not share it
        if info.rank == 0:
            asked = {**self._asked, "ranks": info.world_size}
            (self._folder / "options.json").write_text(json.dumps(asked, indent=1) + "\n", encoding="utf-8")
        mine = self._folder / f"rank-{info.rank}.jsonl"
        self._file = open(mine, "x", encoding="utf-8")  # noqa: SIM115 - open until the process ends
        return store

    def _new_folder(self) -> Path:
        name = f"{time.strftime('%Y%m%d-%H%M%S')}-{_count(self._info.world_size, 'rank').replace(' ', '-')}"
        for number in range(1, 1000):
            with contextlib.suppress(FileExistsError):
                folder = self._log / (name if number == 1 else f"{name}-{number}")
                folder.mkdir()
                return folder
        raise FileExistsError(f"{self._log} is full of runs of this second")

    def _send(self, event: events.Event) -> None:
        """Write one record down."""
        rank = self._info.rank
        if isinstance(event, events.Log):
            self._write(event)
        elif isinstance(event, events.Expect):
            self._steps = event.steps
        elif isinstance(event, events.Started):
            if rank == 0 and self._info.world_size > 1:  # all have joined
                from labkit.launchers.rank_entry import published_name

                (self._log / published_name(self._attempt)).unlink(missing_ok=True)
            self._say(f"{_count(self._info.world_size, 'rank')}, logging to {self._folder}")
        elif isinstance(event, events.Result):
            self._keep(event)
        elif isinstance(event, events.Failure):
            print(f"rank {rank} failed while {event.during}:\n{event.traceback}", file=sys.stderr, flush=True)

    def _write(self, log: events.Log) -> None:
        assert self._file is not None
        width = len(log.names)
        row: dict[str, Any] = {}
        for index, (step, time_s) in enumerate(zip(log.steps, log.times_s, strict=True)):
            values = log.values[index * width : (index + 1) * width]
            row = dict(zip(log.names, values, strict=True))
            line = {"rank": log.rank, "step": step, "time_s": round(time_s, 6), **row}
            self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        if time.monotonic() - self._said_s >= SAY_EVERY_S:
            self._said_s = time.monotonic()
            of = f" of {self._steps}" if self._steps else ""
            self._say(f"step {step}{of}  " + "  ".join(f"{name} {value:.4g}" for name, value in row.items()))

    def _keep(self, result: events.Result) -> None:
        assert self._folder is not None
        value = loads(result.blob)
        if value is not None:
            torch.save(value, self._folder / f"result-{result.rank}.pt")
        shown = ""
        with contextlib.suppress(TypeError, ValueError):  # of tensors, say
            shown = "" if value is None else f", returned {json.dumps(value):.500}"
        self._say(f"finished{shown}")

    def _say(self, text: str) -> None:
        if self._info.rank == 0:
            print(f"{time.monotonic() - self._began_s:8.1f} s  {text}", flush=True)


class Options(NamedTuple):
    """The command line of a script, and what it leaves as it is.

    By argparse alone: whatever reads a signature better (typer, jsonargparse) would be one more package that every
    machine needs on which an export is to run.
    """

    parser: argparse.ArgumentParser
    fixed: dict[str, Any]
    """Arguments that no option can change."""

    def parse(self, words: list[str]) -> tuple[dict[str, Any], int | None, int | None]:
        """Return the function's arguments, the seed and the threads per rank. Exits with advice if a word is wrong."""
        found = vars(self.parser.parse_args(words))
        seed, threads = found.pop(OURS["seed"]), found.pop(OURS["threads"])
        for name in found:
            if isinstance(self.parser.get_default(name), tuple):  # argparse makes a list
                found[name] = tuple(found[name])
        return {**self.fixed, **found}, seed, threads


OURS = {"seed": "the seed", "threads": "the threads"}
"""Where argparse keeps our own options: under names that no parameter of a function can have."""


def options(function: Callable[..., Any], arguments: dict[str, Any], seed: int | None) -> Options:
    """Derive the command line from the function's parameters: `--batch-size 128`, and `-b` where that is free."""
    parser = argparse.ArgumentParser(
        description=inspect.getdoc(function), formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    fixed, taken = {}, {"-h", "--help"}
    for name, default, annotation in _parameters(function, arguments):
        kind, nargs = _kind(default, annotation)
        if kind is None:
            fixed[name] = default
            continue
        required = default is inspect.Parameter.empty
        settings: dict[str, Any] = {"dest": name, "required": required, "default": None if required else default}
        settings["help"] = "(required)" if required else f"(default: {shown(name, default)})".replace("%", "%%")
        words = [f"--{name.strip('_').replace('_', '-')}", f"-{name.strip('_')[:1].lower()}"]
        if kind is bool:
            words.pop()
            settings["action"] = argparse.BooleanOptionalAction
        else:
            metavar = {int: "N", float: "X"}.get(kind, name.upper())  # type: ignore[call-overload]
            settings |= {"type": kind, "nargs": nargs, "metavar": metavar}
        flags = [word for word in words if word not in taken]
        taken |= {*flags}
        parser.add_argument(*flags, **settings)
    fixed_in_words = {name: shown(name, repr(value)) for name, value in fixed.items()}
    parser.epilog = "\n".join(f"set in the script: {name} = {value:.80}" for name, value in fixed_in_words.items())
    ours = parser.add_argument_group("of the run")
    default_seed = "" if seed is None else f" (default: {seed})"
    for word, what, default in (
        ("seed", f"rank r begins with the random numbers of SEED + r{default_seed}", seed),
        ("threads", "CPU threads per rank; by default a machine's cores, divided by the ranks on it", None),
    ):
        if f"--{word}" in taken:
            parser.set_defaults(**{OURS[word]: default})
        else:
            ours.add_argument(f"--{word}", type=int, default=default, help=what, metavar="N", dest=OURS[word])
    return Options(parser, fixed)


def _parameters(function: Callable[..., Any], arguments: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield name, value as it stands, and annotation of all parameters but the worker."""
    try:
        hints = typing.get_type_hints(function)
    except Exception:  # a hint may name anything, also what is not there
        hints = {}
    parameters = list(inspect.signature(function).parameters.values())[int(takes_worker(function, (), arguments)) :]
    defaults = {p.name: p.default for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
    for name, value in {**defaults, **arguments}.items():
        yield name, value, hints.get(name) if name in defaults else None


def _kind(default: Any, annotation: Any) -> tuple[Callable[[str], Any] | None, str | None]:
    """Return what reads one value of a parameter, and "*" if it has several; (None, None) if no option can give it."""
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):  # str | None
        annotation = next((part for part in typing.get_args(annotation) if part is not type(None)), None)
    if isinstance(default, (tuple, list)):
        kinds = {type(value) for value in default}
        return (kinds.pop(), "*") if len(kinds) == 1 and kinds <= {int, float, str} else (None, None)
    if default is None or default is inspect.Parameter.empty:
        return (annotation if annotation in typing.get_args(Scalar) else _any_literal), None
    if annotation is float and type(default) is int:
        return float, None
    if isinstance(default, Path):
        return Path, None
    return (type(default) if type(default) in typing.get_args(Scalar) else None), None


def _as_json(value: Any) -> Any:
    """Return a value as it is; what JSON has no form for as Python shows it: to be read, not to be loaded."""
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return repr(value)
    return value


def _any_literal(word: str) -> Any:
    try:
        return ast.literal_eval(word)
    except (ValueError, SyntaxError):
        return word


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
