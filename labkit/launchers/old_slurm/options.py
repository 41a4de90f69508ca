"""Which options of `sbatch` a `Slurm` takes: one table of all, and how they are written into the batch script.

Each option has its class here. `tests/tools/make_sbatch_options.py` makes the table of them from `sbatch --help`, and a
test compares it, so that an option of another version is noticed. Those that are not in it are passed on: `sbatch`
refuses what it does not know.
"""

from __future__ import annotations

import numbers
import os
import re
from collections.abc import Mapping
from typing import Any

OURS = {
    "nodes": "nodes=…",
    "ntasks": "nodes= and ranks_per_node=",
    "ntasks-per-node": "ranks_per_node=",
    "job-name": "labkit.launch(…, name=…)",
    "output": "folder=…: run.folder has slurm.out",
    "error": "folder=…: run.folder has slurm.out",
    "open-mode": "nothing: what the job writes is appended to slurm.out",
    "no-requeue": "requeue=False",
    "parsable": "nothing: labkit reads what sbatch prints",
    "quiet": "nothing: labkit reads what sbatch prints",
    "verbose": "nothing: labkit reads what sbatch prints",
}
"""Options that labkit sets, with what to give instead."""

REFUSED = {
    "array": "a run is one job; launch once for each member, with wait=False",
    "test-only": "it starts nothing; `sbatch --test-only` takes the job.sbatch of an earlier run's folder",
    "wrap": "labkit writes the batch script; shell lines that come before the ranks go into setup=…",
    "hetjob": "all nodes of a run are alike; two runs can be launched, or one with the greater of both demands",
    "packjob": "all nodes of a run are alike; two runs can be launched, or one with the greater of both demands",
    "het-group": "all nodes of a run are alike; two runs can be launched, or one with the greater of both demands",
    "wait": "labkit.launch waits by itself, unless it is given wait=False",
    "clusters": "the run is followed by this machine's SLURM; launch where that cluster's SLURM is",
    "cluster-constraint": "the run is followed by this machine's SLURM, and another cluster may take the job",
    "chdir": "ranks work in the notebook's folder; call os.chdir there before the launch, or in the function",
    "input": "ranks read nothing from stdin; open the file in the function",
    "no-kill": "ranks cannot go on without one of their nodes, and would wait for it until the time limit",
    "gpus-per-task": "a rank takes its GPU from all of its node, by local_rank; give gpus_per_node=…",
    "tres-per-task": "a rank takes its GPU from all of its node, by local_rank; give gpus_per_node=…",
    "gpu-bind": "a rank takes its GPU from all of its node, by local_rank; give gpus_per_node=…",
    "tres-bind": "a rank takes its GPU from all of its node, by local_rank; give gpus_per_node=…",
    "uid": "the run's folder is yours alone; launch as that user",
    "gid": "the run's folder is yours alone; launch as a member of that group",
    "help": "it starts nothing",
    "usage": "it starts nothing",
    "version": "it starts nothing",
}
"""Options that change what a job is: a run with them would hang, or not be what it seems. With what to do instead."""

ELSEWHERE = {"nnodes": "nodes", "nproc-per-node": "ranks_per_node", "tasks-per-node": "ranks_per_node"}
"""What torchrun and submitit call arguments of `Slurm`."""

_PASSED_ON = """
    account acctg-freq batch bb bbf begin bell comment constraint container contiguous core-spec cores-per-socket
    cpu-freq cpus-per-gpu cpus-per-task deadline delay-boot dependency distribution exclude exclusive export export-file
    extra-node-info get-user-env gpu-freq gpus gpus-per-node gpus-per-socket gres gres-flags hint hold ignore-pbs
    kill-on-invalid-dep licenses mail-type mail-user mcs-label mem mem-bind mem-per-cpu mem-per-gpu mincpus network nice
    nodefile nodelist ntasks-per-core ntasks-per-gpu ntasks-per-socket overcommit oversubscribe partition power priority
    profile propagate qos reboot requeue reservation signal sockets-per-node spread-job switches thread-spec
    threads-per-core time time-min tmp use-min-nodes wait-all-nodes wckey
    """
PASSED_ON = frozenset(_PASSED_ON.split())
"""Options that are the user's, as they are. Those that decide when and where a job runs are among them."""

_LISTS = "dependency exclude export gpus gres licenses mail-type nodelist partition profile propagate reservation"
LISTS = frozenset(_LISTS.split())
"""Options of which sbatch takes several values, with a comma between them."""

ACROSS_NODES = re.compile(r"\s*(cyclic|arbitrary|plane)", re.IGNORECASE)
"""Of `distribution`: what puts ranks that follow each other on different nodes."""

STACKS = re.compile(r"(^|:)(SIG)?(USR2|12)(@|$)", re.IGNORECASE)


def classes() -> dict[str, str]:
    """Return what is done with each option, in words: labkit's, refused, or passed on."""
    said = {name: f"labkit's: give {instead}" for name, instead in OURS.items()}
    said |= {name: f"refused: {why}" for name, why in REFUSED.items()}
    said |= {name: f"passed on{', also as a list' if name in LISTS else ''}" for name in PASSED_ON}
    return said


def table() -> str:
    """Return all options, a line each: passed on, or what to do instead."""
    return "\n".join(f"--{name:<20} {what}" for name, what in sorted(classes().items()))


def read(options: Mapping[str, Any]) -> dict[str, str | bool]:
    """Return options as sbatch names them, with texts or True and False. Raises TypeError or ValueError."""
    found: dict[str, str | bool] = {}
    for key, value in options.items():
        name = key.replace("_", "-")
        _check_name(name)
        if value is None:
            continue
        found[name] = _value(name, value)
    if "signal" in found and STACKS.search(str(found["signal"])):
        raise ValueError(
            f"signal={found['signal']!r}: labkit asks ranks where they stand by SIGUSR2; let SLURM send USR1"
        )
    if "distribution" in found and ACROSS_NODES.match(str(found["distribution"])):
        raise ValueError(
            f"distribution={found['distribution']!r}: ranks follow each other on each node, as torchrun's do; what it "
            "says of nodes, its first part, may be block or * ('block:cyclic', say)"
        )
    return found


def _check_name(name: str) -> None:
    if name in OURS:
        raise ValueError(f"Slurm() sets {name} itself; give {OURS[name]} instead")
    if name in ELSEWHERE:
        raise TypeError(f"Slurm has no {name.replace('-', '_')}: it is called {ELSEWHERE[name]} here")
    if name in REFUSED:
        raise ValueError(f"Slurm() does not take {name}: {REFUSED[name]}")
    # sbatch takes a beginning of a name for the whole, too: `arr` for `array`.
    meant = sorted(each for each in {*OURS, *REFUSED, *PASSED_ON} if each.startswith(name))
    if name not in PASSED_ON and meant:
        raise ValueError(f"{name!r} is short for {', '.join(meant[:3])}{', …' if len(meant) > 3 else ''}; write it out")


def _value(name: str, value: Any) -> str | bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, (list, tuple, set, frozenset)):
        if name not in LISTS:
            raise TypeError(f"{name} takes one value, got {value!r:.60}; write it as sbatch does")
        return ",".join(_text(name, each) for each in (sorted(value) if isinstance(value, (set, frozenset)) else value))
    return _text(name, value)


def _text(name: str, value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (str, os.PathLike, numbers.Real)):
        raise TypeError(
            f"{name} is a text or a number, as sbatch takes it, or True or False; got a {type(value).__name__}: "
            f"{value!r:.60}"
        )
    text = os.fspath(value) if isinstance(value, os.PathLike) else str(value)
    if any(ord(each) < 32 for each in text):
        raise ValueError(f"an option of sbatch is one line, got {name}={text!r:.60}")
    return text


def gpus_per_node(options: Mapping[str, str | bool], nodes: int) -> int:
    """Return how many GPUs options of sbatch ask for on each node; 0: none.

    Raises ValueError where they do not say, or where it is not the same number on each.
    """
    if "gpus-per-node" in options:
        return sum(map(_count, str(options["gpus-per-node"]).split(",")))
    if "gres" in options:
        parts = [part.removeprefix("gres/") for part in str(options["gres"]).split(",")]
        if found := sum(_count(part) for part in parts if part.partition(":")[0].partition("=")[0] == "gpu"):
            return found
    if "gpus" in options:
        found = sum(map(_count, str(options["gpus"]).split(",")))
        if found % nodes:
            raise ValueError(f"gpus={options['gpus']!r} are not as many on each of {nodes} nodes; give gpus_per_node=…")
        return found // nodes
    if "gpus-per-socket" in options:
        raise ValueError("gpus_per_socket does not say how many GPUs a node has; give ranks_per_node=…")
    return 0


def _count(amount: str) -> int:
    """Return the number in what SLURM takes as GPUs: 4, "a100:4", "gpu:a100:4(S:0-1)", or a type alone, which is 1."""
    last = re.split("[:=]", amount.partition("(")[0])[-1]
    return int(last) if last.isdigit() else 1


def lines(options: Mapping[str, str | bool]) -> list[str]:
    """Return the lines of a batch script that have these options."""
    return [
        f"#SBATCH --{name}" if value is True else f"#SBATCH --{name}={quoted(str(value))}"
        for name, value in options.items()
        if value is not False
    ]


def read_back(script: str) -> list[str]:
    """Return the options in a batch script as arguments of `sbatch`.

    Both are given, for variables such as SBATCH_PARTITION come before the lines of a script, but after arguments.
    """
    found = re.findall(r"^#SBATCH (--[\w-]+)(?:=(.*))?$", script, re.MULTILINE)
    return [name if value == "" else f"{name}={_unquoted(value)}" for name, value in found]


def _unquoted(value: str) -> str:
    return re.sub(r"\\(.)", r"\1", value[1:-1]) if value.startswith("'") else value


def quoted(text: str) -> str:
    r"""Return a value as sbatch reads it from a script: also within quotes a \ takes the next character as it is."""
    if re.fullmatch(r"[\w@%+=:,./-]+", text, re.ASCII):
        return text
    return "'" + re.sub(r"([\\'])", r"\\\1", text) + "'"
