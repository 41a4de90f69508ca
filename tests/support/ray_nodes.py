"""A real Ray cluster of several nodes on this machine, to be thrown away: every node is a few processes, on loopback.

`ray.cluster_utils.Cluster` starts them, in a process of its own: tests never import Ray.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import json
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

ROOT = Path(__file__).parents[2]
UP_S = 240
CPUS = 2
"""Of each node, as Ray counts."""
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "RAY_DEDUP_LOGS": "0",
    "RAY_IGNORE_UNHANDLED_ERRORS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_agent_register_timeout_ms": "240000",
    "RAY_raylet_start_wait_time_s": "240",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_infeasible_task_early_exit": "0",
}


def missing() -> str:
    """Return why no cluster can be started here; "" if one can."""
    return "" if importlib.util.find_spec("ray") else "no Ray here: pip install ray"


_running: list[RayNodes] = []


def family() -> set[int]:
    """Return the process ids of all nodes that this process has started, and of what runs there."""
    found: set[int] = set()
    for nodes in _running:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(nodes.process.pid)
            found |= {process.pid, *(child.pid for child in process.children(recursive=True))}
    return found


AGENT_PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port", "runtime_env_agent_port")
"""Of a node's two processes in Python. A raylet dies that does not hear within 15 s which ports they have chosen, and
on a busy machine they take longer to start: https://github.com/ray-project/ray/issues/65983."""


def _python(folder: Path) -> str:
    """Return this Python by a path without spaces: where there is a `runtime_env`, a shell starts Ray's workers, and
    Ray quotes nothing."""
    if " " not in sys.executable:
        return sys.executable
    (folder / "env").symlink_to(sys.prefix)
    return str(folder / "env" / Path(sys.executable).relative_to(sys.prefix))


class RayNodes:
    """Nodes by number, from 0, which is the head."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (folder / "ray").mkdir()
        environment = {**os.environ, **ENVIRONMENT, "RAY_TMPDIR": str(folder)}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        self._errors = open(folder / "nodes.err", "wb")  # noqa: SIM115 - open as long as the nodes
        self.process = subprocess.Popen(
            [_python(folder), "-m", "tests.support.ray_nodes", str(folder)],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            start_new_session=True,
        )
        _running.append(self)
        try:
            self.address: str = self._answer()["address"]
        except RuntimeError:
            self.down()
            raise

    def add(self) -> int:
        """Add a node; return its number."""
        return self._do("add")["number"]

    def kill(self, number: int) -> None:
        """End all processes of a node, as a power cut would."""
        self._do(f"kill {number}")

    def have(self, count: int) -> None:
        """Wait until there are no more nodes than so many, and add those that are missing."""
        deadline = time.monotonic() + UP_S
        while self.state()["nodes"] > count and time.monotonic() < deadline:
            time.sleep(0.1)
        while self.state()["nodes"] < count:
            self.add()

    def state(self) -> dict:
        """Return how many nodes and actors live, and how many CPUs are free."""
        return self._do("state")

    def processes(self) -> list[psutil.Process]:
        """The ranks, and what multiprocessing has beside them."""
        found = []
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self.process.pid).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    command = " ".join(process.cmdline())
                    alive = process.status() != psutil.STATUS_ZOMBIE
                    if alive and "multiprocessing" in command:
                        found.append(process)
        return found

    def down(self) -> None:
        """End all of it."""
        family = psutil.Process(self.process.pid).children(recursive=True) if self.process.poll() is None else []
        with contextlib.suppress(BrokenPipeError, subprocess.TimeoutExpired):
            self.process.communicate(timeout=30)
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.kill()
        self.process.wait()
        self._errors.close()
        _running.remove(self)

    def _do(self, words: str) -> dict:
        self.process.stdin.write(words + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict:
        for line in self.process.stdout:
            with contextlib.suppress(ValueError):
                return json.loads(line)
        errors = (self._folder / "nodes.err").read_text(errors="replace")
        logs = self._folder.glob("ray/session_2*/logs/*[vt].[oe]*")  # gcs_server.out, raylet.err, …
        said = "\n".join(f"{log.name}: …{log.read_text(errors='replace')[-1000:]}" for log in sorted(logs))
        raise RuntimeError(f"the Ray nodes are gone, at load {os.getloadavg()}:\n{errors[-3000:]}\n{said}")


@contextlib.contextmanager
def running() -> Iterator[RayNodes]:
    """Yield a cluster of two nodes, and end it. Its folders go with it."""
    folder = Path(tempfile.mkdtemp(prefix="lk-ray-", dir="/tmp"))  # a socket's path may not be long
    before = os.environ.pop("RAY_ADDRESS", None)
    nodes = RayNodes(folder)
    try:
        yield nodes
    finally:
        nodes.down()
        shutil.rmtree(folder, ignore_errors=True)
        if before is not None:
            os.environ["RAY_ADDRESS"] = before


def main(folder: str) -> None:
    """Be the process that has the nodes."""
    import ctypes

    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    from ray._private import services
    from ray._private.node import Node
    from ray._private.state import GlobalState
    from ray.cluster_utils import Cluster

    # Of a node's processes these two are Python's, take seconds of a CPU to start, and serve nothing here.
    Node.start_api_server = lambda self, **_: None
    services.get_node = patient(services.get_node)
    services.start_raylet = with_port_known(services.start_raylet)
    options = {
        "num_cpus": CPUS,
        "num_gpus": 0,
        "object_store_memory": 80 * 2**20,
        "include_dashboard": False,
        "no_monitor": True,
        "include_log_monitor": False,  # what ranks print comes by labkit's own ways
        "plasma_directory": folder,
        "temp_dir": f"{folder}/ray",
    }
    cluster = Cluster(shutdown_at_exit=True)
    nodes: list = []
    gcs: GlobalState = cluster.global_state

    def add() -> int:
        # Ray takes 127.0.0.1 for the machine's outer address, but not the rest of the loopback network.
        ports = dict(zip(AGENT_PORTS, free_ports(len(AGENT_PORTS)), strict=True))
        nodes.append(cluster.add_node(node_ip_address=f"127.0.0.{len(nodes) + 2}", **ports, **options))
        return len(nodes) - 1

    def say(**what: object) -> None:
        answers.write(json.dumps(what) + "\n")

    add(), add()
    say(address=cluster.address)
    try:
        for line in sys.stdin:
            kind, *words = line.split()
            if kind == "add":
                say(number=add())
            elif kind == "kill":
                with contextlib.suppress(AssertionError, KeyError):  # it had gone by itself
                    cluster.remove_node(nodes[int(words[0])], allow_graceful=False)
                say(killed=words[0])
            elif kind == "state":
                alive = sum(node["Alive"] for node in gcs.node_table())
                actors = len(gcs.actor_table(None, None, "ALIVE"))
                say(nodes=alive, free=gcs.available_resources().get("CPU", 0), actors=actors)
    finally:
        cluster.shutdown()


def with_port_known(start_raylet):
    """Return `start_raylet`, which first writes the port file that a raylet waits for even if it was given the port."""
    from ray._raylet import DASHBOARD_AGENT_LISTEN_PORT_NAME, persist_port

    def start(*args, **options):
        given = inspect.signature(start_raylet).bind(*args, **options).arguments
        port = given["dashboard_agent_listen_port"]
        persist_port(given["session_dir"], given["node_id"], DASHBOARD_AGENT_LISTEN_PORT_NAME, port)
        return start_raylet(*args, **options)

    return start


def patient(get_node):
    """Return a look for a node that Ray gives 30 s, also on a busy machine, which it does not give up so soon."""

    def look(*what):
        deadline = time.monotonic() + UP_S
        while True:
            try:
                return get_node(*what)
            except RuntimeError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    return look


if __name__ == "__main__":
    main(sys.argv[1])
