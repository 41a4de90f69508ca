"""A real SLURM of two nodes on this machine, to be thrown away: as the current user, nothing outside one folder.

Needs `apt-get install slurmctld slurmd slurm-client munge`, but no root, no systemd and no configuration in /etc.
"""

from __future__ import annotations

import contextlib
import ctypes
import getpass
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from tests.support.ports import free_ports
from tests.support.programs import SLURM_PATH as PATH

DAEMONS = ("munged", "slurmctld", "slurmd", "slurmscriptd")
"""What lives as long as the cluster; the controller starts the last of them itself."""
NODES = ("node1", "node2")
UP_S = 120
"""How long SLURM may take to come up, or to answer, on a machine that is busy."""
PRCTL = ctypes.CDLL(None).prctl if sys.platform == "linux" else None

CONFIGURATION = """\
ClusterName=lab
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
# A job that is started again waits so long; by default it is two minutes.
AuthInfo=socket={folder}/munge.sock,cred_expire=5
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=2,sched_min_interval=100000,bf_interval=2
# Nodes may have more processors than this machine has.
SlurmdParameters=config_overrides
ReturnToService=1
# What ranks have for a last checkpoint when they are to go; enough for a few short steps on a machine that is busy.
KillWait=5
MinJobAge=300
# A node that has crashed is down after two questions that nobody answered: 14 s here, 28 s with a timeout of 10 s each.
SlurmdTimeout=8
MessageTimeout=4
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
NodeName=node1 NodeHostname=node1 NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4 RealMemory=2000 State=UNKNOWN
NodeName=node2 NodeHostname=node2 NodeAddr=127.0.0.1 Port={ports[3]} CPUs=4 RealMemory=2000 State=UNKNOWN
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=9
"""


class Cluster:
    """Two nodes that are idle. Whatever is started is a child of this process and is ended by its handle."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.configuration = str(folder / "slurm.conf")
        self._daemons: list[tuple[str, subprocess.Popen[bytes]]] = []
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "SBATCH_", "SRUN_"))}
        self.environment |= {"PATH": PATH, "SLURM_CONF": self.configuration}

    def run(self, *command: str) -> str:
        """Run one of SLURM's commands and give what it prints."""
        done = subprocess.run(command, env=self.environment, text=True, capture_output=True, timeout=UP_S, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
        return done.stdout

    def update(self, **what: str) -> None:
        """Change something with `scontrol update`."""
        self.run("scontrol", "update", *(f"{key}={value}" for key, value in what.items()))

    def jobs(self) -> list[str]:
        """Numbers of the jobs that are not over."""
        return self.run("squeue", "-h", "-o", "%A").split()

    def is_idle(self) -> bool:
        """Whether both nodes are up and have nothing to do."""
        return self.run("sinfo", "-h", "-p", "debug", "-o", "%D %t").split() == ["2", "idle"]

    def resume(self) -> bool:
        """Take nodes that are down or drained into service again; say whether both are idle."""
        for line in self.run("sinfo", "-h", "-N", "-p", "debug", "-o", "%N %t").splitlines():
            node, state = line.split()
            if state.startswith(("dr", "down")):
                with contextlib.suppress(RuntimeError):  # it has come back meanwhile
                    self.update(NodeName=node, State="RESUME")
        return self.is_idle()

    def processes(self, node: str = "") -> list[psutil.Process]:
        """Those of jobs and steps, perhaps of one node only. SLURM detaches them from its daemons."""
        found = set()
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                environment = process.environ()
                there = environment.get("SLURMD_NODENAME")
                mine = environment.get("SLURM_CONF") == self.configuration and there and node in ("", there)
                if mine and process.status() != psutil.STATUS_ZOMBIE:
                    found |= {process, *(one for one in process.parents() if "slurmstepd" in one.name())}
        return sorted(found, key=lambda process: process.pid)

    def up(self) -> None:
        """Start the daemons and wait for the nodes."""
        folder = self.folder
        (folder / "state").mkdir(parents=True)
        (folder / "spool").mkdir()
        folder.chmod(0o755)  # munged insists
        text = CONFIGURATION.format(folder=folder, user=getpass.getuser(), ports=free_ports(4))
        (folder / "slurm.conf").write_text(text)
        # slurmd initialises a cgroup plugin even where nothing uses it, and only this one starts in a container.
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        key = folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        where = {"key-file": key, "socket": folder / "munge.sock", "pid-file": folder / "munged.pid"}
        where |= {"log-file": folder / "munged.log", "seed-file": folder / "munge.seed"}
        self._start("munged", "-F", *(f"--{name}={path}" for name, path in where.items()))
        self._until("munged", lambda: (folder / "munge.sock").exists())
        self._start("slurmctld", "-D")
        self._until("slurmctld", lambda: self.run("scontrol", "ping"))
        for node in NODES:
            self.start_node(node)
        self._until("idle nodes", self.is_idle)

    def start_node(self, node: str) -> None:
        """Start a node's daemon."""
        self._start("slurmd", "-D", "-N", node, name=node)

    def down(self) -> None:
        """End all of it."""
        if any(name == "slurmctld" and daemon.poll() is None for name, daemon in self._daemons):
            with contextlib.suppress(RuntimeError):
                self.run("scancel", "-u", getpass.getuser())
                deadline = time.monotonic() + 10
                while self.jobs() and time.monotonic() < deadline:
                    time.sleep(0.1)
        for _, daemon in reversed(self._daemons):
            daemon.terminate()
            try:
                daemon.wait(5)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        self._daemons = []
        shutil.rmtree(self.folder, ignore_errors=True)

    def _start(self, program: str, *arguments: str, name: str = "") -> None:
        with open(self.folder / f"{name or program}.out", "ab") as output:
            daemon = subprocess.Popen(
                [program, *arguments],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_end_with_the_parent,
            )
        self._daemons.append((name or program, daemon))

    def _until(self, what: str, there) -> None:
        deadline = time.monotonic() + UP_S
        while time.monotonic() < deadline and all(daemon.poll() is None for _, daemon in self._daemons):
            with contextlib.suppress(RuntimeError):
                if there():
                    return
            time.sleep(0.02)
        logs = sorted([*self.folder.glob("*.out"), *self.folder.glob("*.log")])
        tails = "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-1500:]}" for log in logs)
        raise RuntimeError(f"SLURM did not come up: waiting for {what}\n{tails}")


def _end_with_the_parent() -> None:
    """Have Linux end this daemon when the process that started it is killed; nobody else would."""
    if PRCTL is not None:
        PRCTL(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


@contextlib.contextmanager
def running() -> Iterator[Cluster]:
    """Yield a cluster that this process's SLURM commands use, and end it."""
    # Not pytest's folder: munged wants its socket where every folder above is open to all, and a short path.
    temporary = os.environ.get("PYTEST_DEBUG_TEMPROOT")
    before = os.environ.get("SLURM_CONF")
    parent = Path(tempfile.mkdtemp(prefix="labkit-slurm-", dir=temporary))
    parent.chmod(0o755)
    cluster = Cluster(parent / "c")
    try:
        try:
            cluster.up()
        except RuntimeError:  # a port may have been taken meanwhile
            cluster.down()
            cluster.up()
        os.environ["SLURM_CONF"] = cluster.configuration
        yield cluster
    finally:
        if before is None:
            os.environ.pop("SLURM_CONF", None)
        else:
            os.environ["SLURM_CONF"] = before
        cluster.down()
        shutil.rmtree(parent, ignore_errors=True)
