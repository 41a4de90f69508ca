"""Faults drawn from a grammar, and launched: is the right rank blamed, on the right line?

A case is a program: who, a fault, the group whose members wait, what carries the messages, how many ranks, and where
they come from. What is right follows from how it is made: one rank does something at the line marked FAULT, the others
wait for it at the line marked WAIT. A case that comes out wrong is printed as a program to paste.

Each rank notes that it has come to its line. A run's own time limits are counted from there, so that a slow start
counts for nothing.
"""

from __future__ import annotations

import random
import re
import textwrap
import time
from pathlib import Path
from typing import Any, NamedTuple

import labkit
from tests.support import transports

SILENT_S = 2.0
"""`stall_s` of programs that nothing else ends. It begins when the ranks are at the fault."""

LIMIT_S, LIMIT_OF_TRANSFERS_S = 1.0, 5.0
"""A group's own time limit. It is set at the fault; for sends and receives when the group is made, for good."""

REACHED_S, ENDED_S = 240.0, 60.0
"""How long a case may take to come to its fault, and from there to its end."""


class Fault(NamedTuple):
    """What one rank does in place of meeting the others."""

    code: str
    """Where FAULT stands, or anywhere if it does not, the fault is. The rank notes the time before, or at `{note}`."""
    ends_by: str = ""
    """What ends the run if no error does: "stall_s", or the group's "limit"."""
    line: str = "FAULT"
    """The line that the message must name: that of the fault, of those who WAIT, or none ("")."""
    is_even: bool = False
    """Whether of two ranks neither is wrong."""
    said: str = ""
    """Words that the message must have."""
    groups: tuple[str, ...] = ("default", "subgroup", "mesh", "pipeline")
    wait: str = ""
    """What the members do then, if it is not only to meet; where the fault is, too, if `code` is none."""


NOTE = "transports.note(notes, worker.rank)"
"""Notes the time at which a rank has come to its line."""

NONE = "pass"
COLLECTIVE = ("default", "subgroup", "mesh")
FAULTS = {
    "returns": Fault("return", line="WAIT"),
    "raises": Fault('raise ValueError("bad batch")  # FAULT', said="ValueError: bad batch"),
    "exits 0": Fault("os._exit(0)  # FAULT", line="", said="exit code 0"),
    "exits 3": Fault("os._exit(3)  # FAULT", line="", said="exit code 3"),
    "SIGKILL": Fault("os.kill(os.getpid(), signal.SIGKILL)  # FAULT", line="", said="SIGKILL"),
    "sleeps": Fault("time.sleep(1e6)  # FAULT", "stall_s"),
    "loops": Fault("while True: pass  # FAULT", "stall_s"),
    "leaves": Fault("dist.destroy_process_group()  # FAULT\ntime.sleep(1e6)", said="left its process group"),
    "another collective": Fault(
        "dist.broadcast(x, group=group, group_src=0)  # FAULT\ntime.sleep(1e6)",
        "stall_s",
        "",
        True,
        groups=COLLECTIVE,
    ),
    "another shape": Fault(
        "dist.all_reduce(torch.ones(100_000), group=group)  # FAULT\ntime.sleep(1e6)",
        "stall_s",
        "",
        True,
        groups=COLLECTIVE,
    ),
    "another dtype": Fault(
        "dist.all_reduce(x.double(), group=group)  # FAULT\ntime.sleep(1e6)", "stall_s", "", True, groups=COLLECTIVE
    ),
    "another order": Fault(
        "dist.all_reduce(x, group=second)  # FAULT\ndist.all_reduce(x, group=group)",
        "stall_s",
        is_even=True,
        said="use groups in the same order on every rank",
        groups=("default", "subgroup"),
    ),
    "a time limit passes": Fault(
        "while True: torch.ones(64, 64) @ torch.ones(64, 64)  # FAULT",
        "limit",
        said="did not",
        groups=("default", "subgroup", "pipeline"),
    ),
    "fails in a thread": Fault(
        """\
        def load():
            raise ValueError("no more batches")  # Python prints it: it is in the rank's output
        threading.Thread(target=load).start()
        queue.Queue().get()  # FAULT""",
        "stall_s",
        said="and it is in queue.Queue().get at",
    ),
    "fails in a hook": Fault(
        """\
        def hook(gradient):
            raise ValueError("bad gradient")  # FAULT
        weight = torch.ones(4, requires_grad=True)
        weight.register_hook(hook)
        weight.sum().backward()""",
        said="ValueError: bad gradient",
    ),
    "fails in a DataLoader": Fault(
        """\
        class Data(torch.utils.data.Dataset):
            def __len__(self):
                return 8
            def __getitem__(self, index):
                {note}
                raise ValueError("bad picture")  # FAULT
        next(iter(torch.utils.data.DataLoader(Data(), num_workers=1)))""",
        said="ValueError",
    ),
    "is deep in a recursion": Fault(
        """\
        def deep(count):
            if count:
                deep(count - 1)
            time.sleep(1e6)  # FAULT
        deep(200)""",
        "stall_s",
    ),
    "is missed in another thread": Fault(
        "time.sleep(1e6)  # FAULT",
        "stall_s",
        said="in another thread",
        groups=COLLECTIVE,
        wait="""\
        def waits():
            {meet}
        thread = threading.Thread(target=waits)
        thread.start()
        thread.join()""",
    ),
    "fails in a communication hook": Fault(
        NONE,
        said="bad bucket",
        groups=COLLECTIVE,
        wait="""\
        def scale(future):
            if worker.rank == {odd}:
                {note}
                raise ValueError("bad bucket")  # FAULT
            return future.value()[0]
        def hook(state, bucket):
            return dist.all_reduce(bucket.buffer(), group=group, async_op=True).get_future().then(scale)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4), process_group=group)
        model.register_comm_hook(None, hook)
        model(torch.ones(2, 4)).sum().backward()
        {meet}""",
    ),
    "sends more than is received": Fault(
        NONE,
        line="WAIT",
        is_even=True,
        said="got 64 bytes",
        groups=("pipeline",),
        wait="""\
        if worker.rank == {odd} + 1: dist.recv(x, {odd}, group=group)  # WAIT
        if worker.rank == {odd}: dist.send(torch.ones(16), {odd} + 1, group=group)""",
    ),
}
TRANSPORTS = ("TCP", "as libuv", "as NCCL")
PLACES = ("reserved", "new")


class Case(NamedTuple):
    """One program, and what is right."""

    fault: str
    group: str
    transport: str
    world_size: int
    odd: int
    where: str

    @property
    def members(self) -> list[int]:
        """The ranks that meet."""
        if self.group == "subgroup":
            return sorted({self.odd, (self.odd + 1) % self.world_size})
        if self.group == "mesh":
            return [self.odd // 2 * 2, self.odd // 2 * 2 + 1]
        return list(range(self.world_size))

    @property
    def right(self) -> set[int]:
        """The ranks that may be blamed."""
        if self.fault == "sends more than is received":
            return {self.odd, self.odd + 1}
        return set(self.members) if FAULTS[self.fault].is_even and len(self.members) == 2 else {self.odd}

    @property
    def limit_s(self) -> float:
        """The time limit that must pass, in seconds; 0 if none must."""
        if FAULTS[self.fault].ends_by == "limit" and self.group == "pipeline" and self.transport != "as NCCL":
            return LIMIT_OF_TRANSFERS_S
        return {"stall_s": SILENT_S, "limit": LIMIT_S}.get(FAULTS[self.fault].ends_by, 0.0)

    def __str__(self) -> str:
        return f"{self.fault}, {self.group}, {self.transport}, rank {self.odd} of {self.world_size}, {self.where}"

    @property
    def source(self) -> str:
        """The program."""
        fault = FAULTS[self.fault]
        make, meet, wait = self._group()
        limit = ""
        if fault.ends_by == "limit" and self.transport == "as NCCL":
            kind = "RECV" if self.group == "pipeline" else "ALLREDUCE"
            described = 'str(dist.distributed_c10d._world.pg_names[group]), "undefined"'
            wait = f'transports.abort_after(worker.rank, {self.limit_s}, 3, "{kind}", {described})\n{wait}'
        elif fault.ends_by == "limit" and self.group != "pipeline":
            limit = f"dist.set_timeout(timedelta(seconds={self.limit_s}), group)"
        fault_code = textwrap.dedent(fault.code).format(note=NOTE)
        noting = [rank for rank in self.members if rank != self.odd or NOTE not in fault_code + wait]
        lines = [
            "import os, queue, signal, threading, time",
            "from datetime import timedelta",
            "import torch, torch.distributed as dist",
            "from torch.distributed.device_mesh import init_device_mesh",
            "from tests.support import transports  # run it in the repository's root",
            "",
            "def program(worker, path=None, notes=None):",
            f"    # {self}",
            "    x = torch.ones(8)",
            *textwrap.indent(make, "    ").splitlines(),
            "    if path:  # a transport that tells nobody that a rank has gone",
            "        transports.keep_open(path)",
            f"    if worker.rank in {self.members}:",
            "        for step in range(2):",
            *textwrap.indent(meet, " " * 12).splitlines(),
            "            worker.log(loss=1.0)",
            *textwrap.indent(limit, " " * 8).splitlines(),
            f"    if worker.rank in {noting}:",
            f"        {NOTE}",
            f"    if worker.rank == {self.odd}:",
            *textwrap.indent(fault_code, " " * 8).splitlines(),
            f"    if worker.rank in {self.members}:",
            *textwrap.indent(wait, " " * 8).splitlines(),
        ]
        return "\n".join(lines) + "\n"

    def _group(self) -> tuple[str, str, str]:
        """Return what makes the group, meets in it, and waits in it."""
        make = "group = second = None"
        if FAULTS[self.fault].ends_by == "limit" or self.group == "subgroup":
            within = f", timeout=timedelta(seconds={self.limit_s})" if self.limit_s == LIMIT_OF_TRANSFERS_S else ""
            make = f"group, second = dist.new_group({self.members}{within}), dist.new_group({self.members})"
        elif self.fault == "another order":
            make = "group, second = dist.new_group(), dist.new_group()"
        elif self.group == "mesh":
            make = 'group = second = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["tp"].get_group()'
        meet = "dist.all_reduce(x, group=group)"
        wait = f"{meet}  # WAIT"
        if self.fault == "another order":
            wait += "\ndist.all_reduce(x, group=second)"
        if self.group == "pipeline":
            first, last = self.members[0], self.members[-1]
            wait = (
                f"if worker.rank > {first}: dist.recv(x, worker.rank - 1, group=group)  # WAIT\n"
                f"if worker.rank < {last}: dist.send(x, worker.rank + 1, group=group)  # WAIT"
            )
        if own := FAULTS[self.fault].wait:
            wait = textwrap.dedent(own).format(meet=wait, odd=self.odd, note=NOTE)
        return make, meet, wait


def draw(chance: random.Random, where: tuple[str, ...] = PLACES) -> Case:
    """Return a case, any as likely as another."""
    fault = chance.choice(list(FAULTS))
    group = chance.choice(FAULTS[fault].groups)
    world_size = 4 if group == "mesh" else chance.choice([2, 3, 4])
    # Who is last in a pipeline is waited for by nobody.
    odd = chance.randrange(world_size - 1 if group == "pipeline" else world_size)
    return Case(fault, group, chance.choice(TRANSPORTS), world_size, odd, chance.choice(where))


class Outcome(NamedTuple):
    """What came of a case: whether rank and line are right, and what was said."""

    rank: bool
    line: bool
    said: str


def lines_of(source: str, mark: str) -> list[int]:
    """Return the numbers of the lines with this mark."""
    return [number for number, line in enumerate(source.splitlines(), 1) if line.endswith(f"# {mark}")]


def try_out(case: Case, session: Any, folder: Path) -> Outcome:
    """Launch a case; return what of its error is right."""
    file = folder / f"case_{time.monotonic_ns()}.py"
    file.write_text(case.source)
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(case.source, str(file), "exec"), names)
    fault = FAULTS[case.fault]
    on = {"reserved": session, "new": None}.get(case.where)
    notes = file.with_suffix("")
    notes.mkdir()
    with transports.holding() as path:
        run = labkit.launch(
            names["program"],
            None if case.transport == "TCP" else path,
            str(notes),
            world_size=case.world_size,
            on=on,
            stall_s=case.limit_s if fault.ends_by == "stall_s" else None,
            live=False,
            wait=False,
        )
        is_reached = _follow(run, case, notes)
        if not run.over.is_set():
            run.stop(0)
            where = "" if is_reached else ", and has not come to the fault"
            return Outcome(False, False, f"goes on{where}: {run.states}")
    if run.error is None:
        return Outcome(False, False, f"{run.status}, without an error")
    said = str(run.error)
    if not is_reached:
        return Outcome(False, False, f"ended before rank {case.odd} had come to the fault\n{said}")
    right = "|".join(map(str, lines_of(case.source, fault.line)))
    has_line = not fault.line or re.search(rf"{re.escape(file.name)}, line ({right})\b", _plain(said)) is not None
    return Outcome(run.error.rank in case.right, has_line and fault.said in said, said)


def _follow(run: labkit.Run, case: Case, notes: Path) -> bool:
    """Wait for the end of a run; return whether the rank at fault came to its line.

    Its `stall_s` does not run before all have come to theirs, as it does not while somebody is at a prompt.
    """
    is_reached, until_s = False, time.monotonic() + REACHED_S
    while not run.over.wait(0.02) and time.monotonic() < until_s:
        if not is_reached:
            is_reached = _noted(notes) == set(case.members)
            (run.paused_by.discard if is_reached else run.paused_by.add)(run._asking)
            until_s = time.monotonic() + ENDED_S if is_reached else until_s
    return case.odd in _noted(notes)


def _noted(notes: Path) -> set[int]:
    """Return the ranks that have come to their line."""
    return {int(note.name) for note in notes.iterdir() if note.name.isdecimal()}


def _plain(said: str) -> str:
    """Return a message whose tracebacks name files as its other lines do."""
    for line in said.splitlines():
        if (at := line.strip()).startswith('File "'):
            path, _, rest = at.removeprefix('File "').partition('", ')
            said = said.replace(at, f"{Path(path).name}, {rest}")
    return said
