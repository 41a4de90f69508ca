"""Batch scripts with a mistake each, and what would come of a script under SLURM, tried without one.

`symptom` runs a script in bash. In the place of `srun`, `scontrol`, `torchrun` and `python` stand programs that start
nothing but note with which variables and arguments they were called, on which node. From these notes it is worked out
which ranks there would be, and whether they would meet. What the shell does with a line (`$SLURM_NODEID` outside of
quotes, `$RANDOM` in every task) is therefore the shell's own doing. `tests/course/test_batch_scripts.py` compares the
notes with a real SLURM's.
"""

from __future__ import annotations

import html
import re
import shlex
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

NODES, GPUS = 2, 4
"""What the scripts are for: so many nodes, with so many GPUs each, and a rank for each GPU."""

LIMIT_S = 10.0
"""How long a script may take: they start nothing that takes time."""

_MEET = """\
export MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
"""

_FOUR_TASKS = """\
#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
"""

_ONE_TASK = _FOUR_TASKS.replace("per-node=4", "per-node=1", 1)

SCRIPTS = {
    "A": f"{_ONE_TASK}{_MEET}srun python train.py\n",
    "B": f"{_ONE_TASK}{_MEET}"
    "srun torchrun --nnodes=2 --nproc-per-node=4 --node-rank=$SLURM_NODEID"
    " --master-addr=$MASTER_ADDR --master-port=$MASTER_PORT train.py\n",
    "C": f"{_FOUR_TASKS}{_MEET}srun python train.py\n".replace(
        "$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)", "localhost"
    ),
    "D": f"{_ONE_TASK}{_MEET}"
    "torchrun --nnodes=2 --nproc-per-node=4 --rdzv-backend=c10d"
    " --rdzv-endpoint=$MASTER_ADDR:$MASTER_PORT train.py\n",
    "E": f"{_FOUR_TASKS}{_MEET.splitlines()[0]}\n"
    "srun bash -c 'MASTER_PORT=$((20000 + RANDOM % 10000)) python train.py'\n",
    "F": f"{_FOUR_TASKS}#SBATCH --time=04:00:00\n#SBATCH --signal=USR1@120\n"
    "trap 'touch save-and-stop' USR1  # after each step, train.py looks for this file\n"
    f"{_MEET}srun python train.py &\nwait  # until the signal\nwait  # until train.py has saved\n",
}
"""By letter. Each has one wrong line."""


class Call(NamedTuple):
    """How a program was called."""

    program: str
    """"python" or "torchrun"."""
    arguments: tuple[str, ...]
    variables: Mapping[str, str]
    """Those of `NOTED` that were set and exported, and NODE, on which it runs."""


class Notes(NamedTuple):
    """What a script did when it ran."""

    options: Mapping[str, str]
    """Of its `#SBATCH` lines, by their long names."""
    calls: Sequence[Call]
    handles: bool
    """Whether the batch script's own shell has a trap for SIGUSR1."""
    waits: int
    """How often it called `wait`."""
    is_in_background: bool
    """Whether `srun` was."""
    error: str
    """What bash said."""


class Rank(NamedTuple):
    """A process that trains, and what it would go by."""

    number: int
    world_size: int
    local_rank: int
    node: str
    address: str
    port: str


NOTED = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("SLURM_JOB_NODELIST", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_NUM_TASKS"),
)

_NOTE = f"""\
#!/bin/sh
{{  printf '\\036%s' "${{0##*/}}"
    for argument; do printf '\\037%s' "$argument"; done
    for name in NODE {" ".join(NOTED)}; do eval "printf '\\035%s=%s' $name \\"\\$$name\\""; done
}} >>"$NOTES"
"""

_SRUN = """\
#!/bin/bash
tasks=$SLURM_NTASKS each=1 nodes=$SLURM_JOB_NUM_NODES cpus=${SRUN_CPUS_PER_TASK:-1}
while [[ $1 == -* ]]; do
    case $1 in
        --ntasks-per-node=*) each=${1#*=} ;;
        --ntasks=*) tasks=${1#*=} ;;
        --nodes=*) nodes=${1#*=} ;;
        --cpus-per-task=*) cpus=${1#*=} ;;
        -n) tasks=$2; shift ;;
        -N) nodes=$2; shift ;;
        -c) cpus=$2; shift ;;
    esac
    shift
done
# If the job has a number of tasks, srun takes that, and --ntasks-per-node alone does not change it.
: ${tasks:=$((nodes * each))}
each=$(((tasks + nodes - 1) / nodes))
in_job=$(((${SLURM_NTASKS:-$SLURM_JOB_NUM_NODES} + SLURM_JOB_NUM_NODES - 1) / SLURM_JOB_NUM_NODES))
if ((each * cpus > in_job * ${SLURM_CPUS_PER_TASK:-1})); then
    echo "srun: error: Unable to create step for job $SLURM_JOB_ID: More processors requested than permitted" >&2
    exit 1
fi
export SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=$tasks SLURM_NTASKS=$tasks
for ((task = 0; task < SLURM_NTASKS; task++)); do
    export SLURM_PROCID=$task SLURM_LOCALID=$((task % each)) SLURM_NODEID=$((task / each))
    NODE=$(scontrol show hostnames | sed -n $((SLURM_NODEID + 1))p)
    export NODE SLURMD_NODENAME=$NODE
    "$@"
done
"""

_SCONTROL = """\
#!/bin/sh
[ "$1 $2" = "show hostnames" ] && for node in $EVERY_NODE; do echo $node; done
"""

_BEFORE = """\
unset BASH_ENV
_waits=0 _background=
wait() { _waits=$((_waits + 1)); builtin wait "$@"; }
srun() { echo $BASH_SUBSHELL >"$NOTES.srun"; command srun "$@"; }
trap 'trap -p USR1 >"$NOTES.trap"; echo $_waits >"$NOTES.waits"' EXIT
"""


def programs(folder: Path) -> None:
    """Write the programs that stand for SLURM's, and for those that train, into a folder."""
    texts = dict.fromkeys(("python", "python3", "torchrun"), _NOTE)
    texts |= {"srun": _SRUN, "scontrol": _SCONTROL, "hostname": "#!/bin/sh\necho $NODE\n"}
    for name, text in texts.items():
        (folder / name).write_text(text, "utf-8")
        (folder / name).chmod(0o755)


def options_of(text: str) -> dict[str, str]:
    """Return the options that sbatch reads in a script: those above its first command, without a space after #."""
    found = {}
    for line in text.splitlines():
        if line.strip() and not line.startswith("#"):
            break
        if line.startswith("#SBATCH"):
            for word in shlex.split(line.removeprefix("#SBATCH"), comments=True):
                name, _, value = word.removeprefix("--").partition("=")
                found[name] = value
    return found


def run(text: str, nodes: Sequence[str] = ("gpu07", "gpu08")) -> Notes:
    """Run a script, with programs that only take notes."""
    options = options_of(text)
    each = options.get("ntasks-per-node", "")
    tasks = options.get("ntasks") or (str(int(each) * NODES) if each.isdigit() else "")
    with tempfile.TemporaryDirectory(prefix="labkit-batch-scripts-") as place:
        folder, notes = Path(place) / "bin", Path(place) / "notes"
        folder.mkdir()
        programs(folder)
        (folder / "before.sh").write_text(_BEFORE, "utf-8")
        environment = {
            "PATH": f"{folder}:/usr/bin:/bin",
            "BASH_ENV": f"{folder}/before.sh",
            "NOTES": str(notes),
            "EVERY_NODE": " ".join(nodes),
            "NODE": nodes[0],
            "SLURM_JOB_ID": "4711",
            "SLURM_JOB_NODELIST": "gpu[07-08]",
            "SLURM_JOB_NUM_NODES": options.get("nodes", "1"),
            "SLURM_NNODES": options.get("nodes", "1"),
            "SLURMD_NODENAME": nodes[0],
            **dict.fromkeys(("SLURM_NODEID", "SLURM_PROCID", "SLURM_LOCALID"), "0"),
            **({"SLURM_CPUS_PER_TASK": options["cpus-per-task"]} if "cpus-per-task" in options else {}),
            **({"SLURM_NTASKS_PER_NODE": each} if each else {}),
            **({"SLURM_NTASKS": tasks} if tasks else {}),
        }
        script = Path(place) / "job.sbatch"
        script.write_text(text, "utf-8")
        try:
            done = subprocess.run(
                ["bash", script.name], cwd=place, env=environment, capture_output=True, text=True, timeout=LIMIT_S
            )
            error = done.stderr.strip()
        except subprocess.TimeoutExpired:
            error = f"has not ended after {LIMIT_S:g} s"
        beside = {name: notes.with_name(f"notes.{name}") for name in ("srun", "trap", "waits")}
        said = {name: path.read_text("utf-8").strip() if path.exists() else "" for name, path in beside.items()}
        calls = _read(notes.read_text("utf-8")) if notes.exists() else []
    return Notes(options, calls, bool(said["trap"]), int(said["waits"] or 0), said["srun"] not in ("", "0"), error)


def _read(notes: str) -> list[Call]:
    calls = []
    for note in notes.split("\036")[1:]:
        command, *pairs = note.split("\035")
        program, *arguments = command.split("\037")
        variables = dict(pair.split("=", 1) for pair in pairs)
        calls.append(Call(program.rstrip("3"), tuple(arguments), {k: v for k, v in variables.items() if v}))
    return calls


# What would come of it


def symptom(text: str) -> str:
    """Return what would go wrong first if SLURM ran a script; "" if eight ranks meet, and each has a GPU."""
    notes = run(text)
    if notes.error:
        said = notes.error.splitlines()[0]
        return said if said.startswith("srun: ") else f"bash says: {said}"
    if not notes.calls:
        return "nothing starts train.py"
    agents = [call for call in notes.calls if call.program == "torchrun"]
    if "ntasks" in notes.options and "ntasks-per-node" not in notes.options:
        return f"SLURM may place {notes.options['ntasks']} tasks on {NODES} nodes as it likes: give --ntasks-per-node"
    found = _of_agents(agents) if agents else _of_tasks(notes.calls)
    return found if isinstance(found, str) else _meeting(found) or _gpus(notes) or _signal(notes)


def _of_tasks(calls: Sequence[Call]) -> list[Rank]:
    """Return the ranks that are processes started by the script: `RANK` first, then SLURM's words, or alone."""
    ranks = []
    for call in calls:
        seen = call.variables
        number, local, count = "0", "0", "1"
        if "RANK" in seen:
            number, local, count = seen["RANK"], seen.get("LOCAL_RANK", "0"), seen.get("WORLD_SIZE", "1")
        elif "SLURM_STEP_NUM_TASKS" in seen:
            number, local, count = seen["SLURM_PROCID"], seen["SLURM_LOCALID"], seen["SLURM_STEP_NUM_TASKS"]
        place = seen["NODE"], seen.get("MASTER_ADDR", ""), seen.get("MASTER_PORT", "")
        ranks.append(Rank(int(number), int(count), int(local), *place))
    return ranks


def _of_agents(agents: Sequence[Call]) -> list[Rank] | str:
    """Return the ranks that torchrun's agents would start, or why they would start none."""
    asked = [_torchruns_options(call) for call in agents]
    nodes = int(asked[0].get("nnodes", "1").partition(":")[0])
    each = int(asked[0].get("nproc-per-node", "1"))
    where = [call.variables["NODE"] for call in agents]
    if len(agents) < nodes:
        return (
            f"{_count(len(agents), 'agent')} of torchrun runs, on {where[0]}, and waits for {nodes - len(agents)} more "
            f"(--nnodes={nodes}) until the rendezvous times out: nothing starts one on the other node"
        )
    if len(agents) > nodes:
        return f"{len(agents)} agents of torchrun run, on {' '.join(where)}, and each expects {nodes} (--nnodes)"
    if asked[0].get("rdzv-backend", "static") == "c10d":
        ends = [each_asked.get("rdzv-endpoint", "localhost").partition(":") for each_asked in asked]
        addresses, ports = [end[0] for end in ends], [end[2] or "29400" for end in ends]
        # Which agent is the first is not known before; it may be the one that all look for.
        numbers = [int(node != addresses[0]) for node in where] if addresses[0] in where else list(range(nodes))
    else:
        said = [each_asked.get("node-rank", "0") for each_asked in asked]
        if not all(number.isdigit() for number in said):
            return f"torchrun refuses --node-rank={said[0]}: that is no number"
        numbers = [int(number) for number in said]
        if sorted(numbers) != list(range(nodes)):
            return (
                f"all agents have --node-rank={said[0]}: those on {' and '.join(where)} start the same ranks, each "
                "takes itself for the first node, and nobody is the second"
                if len(set(numbers)) == 1
                else f"the agents have --node-rank {' and '.join(said)}, expected 0 to {nodes - 1}"
            )
        addresses = [each_asked.get("master-addr", "127.0.0.1") for each_asked in asked]
        ports = [each_asked.get("master-port", "29500") for each_asked in asked]
    return [
        Rank(number * each + local, len(agents) * each, local, node, address, port)
        for number, node, address, port in sorted(zip(numbers, where, addresses, ports, strict=True))
        for local in range(each)
    ]


def _torchruns_options(call: Call) -> dict[str, str]:
    """Return torchrun's own options, up to the script: `--nnodes=2` and `--nnodes 2`, with - or _."""
    found, words = {}, list(call.arguments)
    while words and words[0].startswith("-"):
        name, is_whole, value = words.pop(0).lstrip("-").partition("=")
        name = name.replace("_", "-")
        if not is_whole and name not in ("standalone", "no-python", "m") and words:
            value = words.pop(0)
        found[name] = value
    return found


def _meeting(ranks: Sequence[Rank]) -> str:
    """Return why ranks would not meet, or which are missing; "" if they meet."""
    wanted = NODES * GPUS
    by_node = Counter(rank.node for rank in ranks)
    if len(ranks) != wanted:
        per_node = ", ".join(f"{count} on {node}" for node, count in by_node.items())
        return f"{_count(len(ranks), 'rank')} would train ({per_node}), and {wanted} GPUs are to be used"
    if sorted(rank.number for rank in ranks) != list(range(wanted)) or {rank.world_size for rank in ranks} != {wanted}:
        first = ranks[0]
        return f"{len(ranks)} processes start, and the first takes itself for rank {first.number} of {first.world_size}"
    home = next(rank for rank in ranks if rank.number == 0)
    for rank in sorted(ranks):
        if not rank.address or not rank.port:
            return f"rank {rank.number} has no MASTER_{'PORT' if rank.address else 'ADDR'}"
        meant = rank.node if rank.address in ("localhost", "127.0.0.1") else rank.address
        if meant != home.node:
            return (
                f"rank {rank.number}, on {rank.node}, looks for rank 0 at {rank.address}, which is {meant}; rank 0 is "
                f"on {home.node}: a node's ranks wait until the timeout"
            )
        if rank.port != home.port:
            return f"rank {rank.number} looks for port {rank.port}, and rank 0 listens on another, {home.port}"
    return ""


def _gpus(notes: Notes) -> str:
    """Return why a rank has no GPU; "" if each has one."""
    options = notes.options
    per_node = options.get("gpus-per-node") or options.get("gres", "").partition("gpu:")[2]
    number = re.search(r"(\d+)$", per_node)
    count = int(number[1]) if number else 0
    if "gpus" in options:
        count = int(re.findall(r"\d+$", options["gpus"])[0]) // NODES
    if "gpus-per-task" in options:
        count = int(options["gpus-per-task"]) * int(options.get("ntasks-per-node", "1"))
    return "" if count >= GPUS else f"the job has {count} GPUs on each node, and {GPUS} ranks there"


def _signal(notes: Notes) -> str:
    """Return what goes wrong when SLURM says that the time is nearly over; "" where it is not asked to, or all is well.

    train.py handles no signal itself.
    """
    asked = notes.options.get("signal")
    if asked is None:
        return "" if not notes.handles else "the script has a trap for USR1, and SLURM is not asked to send that"
    if not asked.startswith("B:"):
        return (
            f"with --signal={asked} SLURM signals the tasks, which end at once, as nothing in train.py handles it, and "
            "not the batch script, which has the trap"
        )
    if not notes.handles or not asked.startswith(("B:USR1", "B:SIGUSR1", "B:10@")):
        return f"with --signal={asked} the batch script gets a signal for which it has no trap: it ends, and so the job"
    if not notes.is_in_background:
        return "bash runs a trap only when the command in front has ended, and srun is that command: nothing is saved"
    if notes.waits < 2:
        times = "is not waited for" if not notes.waits else "is waited for once, and `wait` returns at the signal"
        return f"srun {times}: the batch script ends, and with it the job, before train.py has saved"
    return ""


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


class Numbered:
    """The scripts with numbered lines, two beside each other. Shows itself."""

    def __repr__(self) -> str:
        return "\n\n".join(f"{letter}\n{_numbered(text)}" for letter, text in SCRIPTS.items())

    def _repr_html_(self) -> str:
        style = "border:1px solid #8A8A8A55;border-radius:4px;padding:0.4em;overflow-x:auto;min-width:0"
        boxes = "".join(
            f"<div style='{style}'><b>{letter}</b>"
            f"<pre style='line-height:1.35;font-size:85%;margin:0'>{html.escape(_numbered(text))}</pre></div>"
            for letter, text in SCRIPTS.items()
        )
        return f"<div style='display:grid;grid-template-columns:1fr 1fr;gap:0.6em'>{boxes}</div>"


def _numbered(text: str) -> str:
    return "\n".join(f"{number:>2}  {line}" for number, line in enumerate(text.splitlines(), 1))


def show() -> Numbered:
    """Return the scripts, to be shown."""
    return Numbered()
